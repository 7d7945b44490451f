"""Environments that misbehave on demand; registered when this file is imported, and played in threads or processes."""

from __future__ import annotations

import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import gymnasium
import numpy as np

MADE: list[Faulty] = []
EATEN: list[bytes] = []
RUNNING = {"now": 0, "most": 0}
_LOCK = threading.Lock()


class Strange(Exception):
    """An exception that exists only here and cannot be pickled."""

    def __init__(self, a, b):
        super().__init__(f"strange {a}")
        self.lock = threading.Lock()


class Picture:
    """Quacks like PIL's, and cannot be pickled either."""

    width = height = 1

    def __init__(self):
        self.lock = threading.Lock()

    def convert(self, mode):
        assert mode == "RGB"
        return np.ones((1, 1, 3), np.uint8)


class Faulty(gymnasium.Env[str, str]):
    """Does what the action says; ``reset`` does what ``on_reset`` says. Says nothing about threads."""

    def __init__(self, on_reset: str = "ok", steps: int = 1000) -> None:
        self.on_reset, self.limit, self.closed = on_reset, steps, False
        MADE.append(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.taken, self.path = 0, []
        info = {"state_key": f"{seed}, 0", "task": f"seed {seed}", "private": threading.Lock()}
        return self._do(self.on_reset)[0], info

    def step(self, action: str) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.taken += 1
        with _LOCK:
            RUNNING["now"] += 1
            RUNNING["most"] = max(RUNNING["most"], RUNNING["now"])
        try:
            observation, reward = self._do(action)
        finally:
            with _LOCK:
                RUNNING["now"] -= 1
        info: dict[str, Any] = {"private": threading.Lock()}
        if not action.startswith("keyless"):
            info["state_key"] = self.taken
        if action == "pictures":
            info["extra"] = {"n": np.int64(3), "of": (1.5, None), "array": np.arange(2)}
            info["images"] = [np.zeros((2, 3, 3), np.uint8), Picture()]
        if action == "secret":
            info["extra"] = {"lock": threading.Lock()}
        return observation, reward, action == "end", self.taken >= self.limit, info

    def close(self) -> None:
        self.closed = True

    def _do(self, what: str) -> tuple[Any, Any]:
        verb, _, argument = what.partition(" ")
        return getattr(self, f"do_{verb}", lambda _: None)(argument) or ("fine", 0.0)

    # --- what it returns ----------------------------------------------------------------------------------------------

    def do_observe(self, _: str) -> Any:
        return 5, 0.0

    def do_reward(self, number: str) -> Any:
        return "fine", float(number)

    def do_text_reward(self, _: str) -> Any:
        return "fine", "much"

    def do_echo(self, text: str) -> Any:
        return text, 0.0

    def do_length(self, text: str) -> Any:
        return str(len(text)), 0.0

    def do_big(self, size: str) -> Any:
        return "ö" * int(size), 0.0

    def do_pid(self, _: str) -> Any:
        return str(os.getpid()), 0.0

    def do_keyless(self, text: str) -> Any:
        self.path.append(text)
        return " ".join(self.path), 0.0

    def do_chance(self, which: str) -> Any:
        return str((random if which == "global" else self.np_random).random()), 0.0

    def do_secretly(self, _: str) -> Any:  # its state depends on something that no seed sets
        self.taken -= int(time.time() * 1e6)

    # --- what it does to its process ----------------------------------------------------------------------------------

    def do_sleep(self, seconds: str) -> Any:
        time.sleep(float(seconds))

    def do_meet(self, folder: str) -> Any:
        """Until three are here at the same time, in whatever process."""
        Path(folder, f"{os.getpid()}-{id(self)}").touch()
        while len(os.listdir(folder)) < 3:
            time.sleep(0.01)
        return "met", 0.0

    def do_spin(self, _: str) -> Any:
        while True:
            pass

    def do_lock(self, _: str) -> Any:  # in C, holding the interpreter's lock: no thread of the process can run
        return str(re.match(r"(a+)+$", "a" * 60 + "b")), 0.0

    def do_freeze(self, _: str) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)

    def do_raise(self, _: str) -> Any:
        raise Strange(1, 2)

    def do_exit(self, _: str) -> Any:
        raise SystemExit(3)

    def do_vanish(self, status: str) -> Any:
        os._exit(int(status))

    def do_crash(self, _: str) -> Any:
        os.kill(os.getpid(), signal.SIGSEGV)

    def do_kill(self, _: str) -> Any:  # as the kernel when memory runs out
        os.kill(os.getpid(), signal.SIGKILL)

    def do_eat(self, then: str) -> Any:
        """Allocate what the process may still have; ``abort``: end as C++ does of an allocation that fails."""
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + (200 << 20), resource.RLIM_INFINITY))
        try:
            while True:
                EATEN.append(bytes(1 << 20))
        except MemoryError:
            if then == "abort":
                os.abort()
            raise

    def do_hang_up(self, _: str) -> Any:
        os.closerange(3, 100)

    def do_print(self, text: str) -> Any:
        print(text)
        os.write(2, b"from C\n")

    def do_flood(self, size: str) -> Any:
        for _ in range(int(size) // 1000):
            os.write(1, b"x" * 999 + b"\n")
        return self.do_print("the end of the flood")

    def do_seed(self, number: str) -> Any:
        random.seed(int(number))

    def do_read(self, _: str) -> Any:
        return repr(sys.stdin.read()), 0.0

    def do_fork(self, _: str) -> Any:
        pid = os.fork()
        return f"forked {pid}", 0.0  # both of them return from here

    def do_start(self, _: str) -> Any:
        """Something of its own, in another session: it outlives what does not look for it."""
        return str(subprocess.Popen(["sleep", "300"], start_new_session=True).pid), 0.0

    def do_stray(self, _: str) -> Any:
        """A fork that leaves its group, and starts no program: only its memory says whose it is."""
        ours, theirs = os.pipe()
        if not os.fork():
            os.setsid()
            if not os.fork():
                os.write(theirs, str(os.getpid()).encode())
                time.sleep(300)
            os._exit(0)
        os.wait()
        return os.read(ours, 20).decode(), 0.0

    def do_known(self, _: str) -> Any:
        """What came along that should not have."""
        known = [name for name in sys.modules if name in ("ray", "torch", "verl")]
        return str(known + [name for name in os.environ if name.startswith("RAY_")]), 0.0


class Safe(Faulty):
    """The same in threads."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "thread_safe": True, "memory_mb": 1}


class Copied(Safe):
    """May be copied as it stands."""

    metadata: ClassVar[dict[str, Any]] = {**Safe.metadata, "deepcopy": True}


class Cloned(Safe):
    """Copies itself."""

    def clone(self) -> Cloned:
        clone = Cloned(self.on_reset, self.limit)
        clone.taken, clone.path = self.taken, [*self.path, "cloned"]
        if "refuse" in self.path:
            raise RuntimeError("not now")
        return clone


for env in (Faulty, Safe, Copied, Cloned):
    gymnasium.register(f"test/{env.__name__}-v0", entry_point=env)
