"""The driver's side: a first signal lets the step end and saves a checkpoint, a second one stops at once.

Before the first step there is nothing to save, and verl may wait for ever for what Ray has not: the first one stops.

verl's driver waits in ``ray.get`` until the trainer has returned. Python runs the handlers of signals meanwhile, and an
exception that a handler raises ends the waiting.
"""

from __future__ import annotations

import functools
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError

from verl_turnkey.plugins.config.checkpoint_files import TRACKER
from verl_turnkey.plugins.config.machine import joins_cluster
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.shutdown import channel
from verl_turnkey.plugins.shutdown.leftovers import RunFiles
from verl_turnkey.plugins.shutdown.own_folder import own_folder

SIGNALS = (signal.SIGTERM, signal.SIGINT)
POLL_SECONDS = 1.0
ECHO_SECONDS = 1.0
"""a signal so soon after the first is its echo: launchers pass on what the terminal has sent to the whole group"""

LAST_LINES_SECONDS = 0.5
"""for which Ray, too, waits at the end of a program, so that what other processes printed last is shown"""


def guard_run() -> None:
    """Put :func:`guarded` around ``run_ppo`` of verl's main program, as which module it may run."""
    for name in ("__main__", "verl.trainer.main_ppo"):
        module = sys.modules.get(name)
        original = getattr(module, "run_ppo", None)
        if original is not None and not hasattr(original, "__wrapped__"):
            module.run_ppo = guarded(original)  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]


def guarded(run_ppo: Callable[..., None]) -> Callable[..., None]:
    """``run_ppo`` that ends as the signals, or word of dead processes, ask for; it cleans up after its processes.

    Raises:
        ConfigError: another run writes its checkpoints to the same folder.
        SystemExit: with :data:`channel.STOPPED`, :data:`channel.DEAD` or 128 and the number of the signal.
    """

    @functools.wraps(run_ppo)
    def run(config: Any, task_runner_class: Any) -> None:
        ending, files = Ending(turnkey_config(config).stop.grace), RunFiles()
        saved = checkpoints_of(config)
        ours = not ray.is_initialized()  # then run_ppo starts Ray, or connects to it
        try:
            with own_folder(config.get("trainer") or {}), files:
                run_ppo(config, task_runner_class=_Begins(task_runner_class, ending.begin))
        except BaseException as error:
            verdict = ending.verdict
            if verdict is None and isinstance(error, channel.StoppedError):
                verdict = channel.STOPPED, str(getattr(error, "cause", error))
            if verdict is None and isinstance(error, (RayActorError, OutOfMemoryError)):
                traceback.print_exception(error)
                verdict = channel.DEAD, f"a process of the run is dead: {died(error)}"
            if verdict is None:
                raise
            code, text = verdict
            # Where the folder is elsewhere, this process does not know.
            goes_on = checkpoints_of(config) != saved or joins_cluster(config)
            print(f"verl-turnkey: {text}. To resume:\n{resume_line(goes_on)}", file=sys.stderr, flush=True)
            raise SystemExit(code) from None
        finally:
            ending.end()
            if ours:
                with _on_signals(files.stop_cleaning), suppress(Exception):  # neither changes how the run ended
                    if ray.is_initialized():
                        time.sleep(LAST_LINES_SECONDS)
                    ray.shutdown()
                    files.clean()

    return run


@contextmanager
def _on_signals(do: Callable[[], None]) -> Iterator[None]:
    before = {number: signal.signal(number, lambda *_: do()) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def died(error: RayActorError | OutOfMemoryError) -> str:
    """Ray's words on an actor that is gone, or that it killed where memory ran out, in one line.

    An error that passed through another actor has a cause.
    """
    return " ".join(str(getattr(error, "cause", error)).split())[:500]


def checkpoints_of(config: Any) -> tuple[str, int] | None:
    """What verl's tracker says, and when it was written; other checkpoints than the run's may be in its folder."""
    tracker = Path(str((config.get("trainer") or {}).get("default_local_dir"))) / TRACKER
    with suppress(OSError):
        return tracker.read_text(errors="replace"), tracker.stat().st_mtime_ns
    return None


def resume_line(saved: bool) -> str:
    """The command of this process; with ``trainer.resume_mode=auto`` where it has ``saved`` and had another one.

    Without a checkpoint of its own it begins as it has begun: what else is in the folder is another run's.
    """
    modes = [word for word in sys.argv if word.lstrip("+").startswith("trainer.resume_mode=")]
    auto = not saved or not modes or modes[-1].endswith("=auto")
    return shlex.join([*sys.orig_argv, *([] if auto else ["trainer.resume_mode=auto"])])


class _Begins:
    """verl's class of the task runner, which calls ``begin`` first: Ray has started, with a handler of its own."""

    def __init__(self, runner: Any, begin: Callable[[], None]) -> None:
        self._runner, self._begin = runner, begin

    def options(self, **options: Any) -> _Begins:
        return _Begins(self._runner.options(**options), self._begin)

    def remote(self, *arguments: Any, **named: Any) -> Any:
        self._begin()
        return self._runner.remote(*arguments, **named)


class Ending:
    """Handlers of signals, and a thread that talks to the trainer; for the main thread only.

    Args:
        grace: seconds from the first signal until the run stops without a checkpoint.
    """

    def __init__(self, grace: float) -> None:
        self.verdict: tuple[int, str] | None = None
        """exit status and reason, once the run has to stop"""
        self._grace = grace
        self._first: tuple[signal.Signals, float] | None = None
        self._begun = False
        self._wake, self._over = threading.Event(), False
        self._before: dict[signal.Signals, Any] = {}

    def begin(self) -> None:
        for entry in channel.ENTRIES:
            channel.delete(entry)
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        threading.Thread(target=self._talk, name="turnkey-stop", daemon=True).start()

    def end(self) -> None:
        self._over = True
        self._wake.set()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number), time.monotonic()
        if not self._begun and self._first is not None and now - self._first[1] < ECHO_SECONDS:
            return
        if self.verdict is None and not self._begun:  # else _talk has a verdict and wakes the main thread
            self._first = name, now
            self.verdict = 128 + number, f"{name.name}: stopped before the first step, so there is nothing to save"
            raise SystemExit(self.verdict[0])
        if self.verdict is None and self._first is None:
            self._first = name, now
            message = (
                f"verl-turnkey: {name.name}: the run stops after this step, with a checkpoint. It stops at once on a "
                f"second signal, or after {self._grace:g} s (turnkey.stop.grace)\n"
            )
            os.write(2, message.encode())  # a handler must not wait for the lock of a stream
            self._wake.set()
            return
        if self.verdict is None:
            assert self._first is not None
            if now - self._first[1] < ECHO_SECONDS:
                return
            self.verdict = 128 + number, f"{name.name}: stopped at once by a second signal, without a new checkpoint"
        raise SystemExit(self.verdict[0])

    def _talk(self) -> None:
        passed_on = False
        while not self._over and self.verdict is None:
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
            try:
                if self._first is not None and not passed_on:
                    channel.put("signal", self._first[0].name)
                    passed_on = True
                self._begun = self._begun or channel.get("begun") is not None
                dead = channel.get("dead")
            except Exception:  # Ray is gone, and the main thread learns of it by itself
                dead = None
            if dead is not None:
                self._stop(channel.DEAD, dead)
            elif self._first is not None and time.monotonic() - self._first[1] > self._grace:
                reason = f"the step did not end within {self._grace:g} s (turnkey.stop.grace)"
                self._stop(128 + self._first[0], f"{self._first[0].name}: {reason}: stopped without a new checkpoint")
            elif self._first is not None:
                time.sleep(POLL_SECONDS / 10)

    def _stop(self, code: int, text: str) -> None:
        if not self._over and self.verdict is None:
            self.verdict = code, text
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)  # pyright: ignore[reportArgumentType]
