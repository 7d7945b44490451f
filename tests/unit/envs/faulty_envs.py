"""Environments that misbehave on demand; registered when this file is imported."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import gymnasium

MADE: list[Faulty] = []
RUNNING = {"now": 0, "most": 0}
_LOCK = threading.Lock()


class Strange(Exception):
    """An exception that exists only here and cannot be pickled."""

    def __init__(self, a, b):
        super().__init__(f"strange {a}")
        self.lock = threading.Lock()


class Faulty(gymnasium.Env[str, str]):
    """Does what the action says; ``reset`` does what ``on_reset`` says."""

    def __init__(self, on_reset: str = "ok", steps: int = 1000) -> None:
        self.on_reset, self.limit, self.closed = on_reset, steps, False
        MADE.append(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.taken = 0
        return self._do(self.on_reset)[0], {"state_key": (seed, 0), "task": f"seed {seed}", "private": threading.Lock()}

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
        return observation, reward, action == "end", self.taken >= self.limit, {"state_key": self.taken}

    def close(self) -> None:
        self.closed = True

    def _do(self, what: str) -> tuple[Any, Any]:
        verb, _, argument = what.partition(" ")
        if verb == "sleep":
            time.sleep(float(argument))
        if verb == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        if verb == "raise":
            raise Strange(1, 2)
        if verb == "exit":
            raise SystemExit(3)
        if verb == "observe":
            return 5, 0.0
        return "fine", float(argument) if verb == "reward" else "much" if verb == "text_reward" else 0.0


gymnasium.register("test/Faulty-v0", entry_point=Faulty)
