"""A thread that looks for dead processes of a run: verl waits for some of them for ever.

:func:`health` runs in every process of the run, which imports this module for it: it imports nothing of verl.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

from verl_turnkey.plugins.notices import logger

LOOK_SECONDS = 20.0
"""between two looks at the processes, half of it for their answers: one that comes later is read at the next look"""


class Watchdog:
    """Calls ``report`` with a sentence about dead processes, in whatever phase of a step they died.

    verl notices a dead process at the next call whose answer it waits for; for some, such as a server between two
    rollouts, it waits for ever. A process that computes does not answer, and is not dead.

    Args:
        patience: seconds without progress until a warning that every process is alive; None: no watchdog.
        progress: returns a value that changes whenever the run advances.
        actors: name -> handle of each process of the run.
        report: called once, in the watchdog's thread.
        look_seconds: see :data:`LOOK_SECONDS`.
    """

    def __init__(
        self,
        patience: float | None,
        progress: Callable[[], Any],
        actors: Callable[[], Mapping[str, Any]],
        report: Callable[[str], None],
        look_seconds: float = LOOK_SECONDS,
    ) -> None:
        self._patience, self._progress, self._actors, self._report = patience, progress, actors, report
        self._look_seconds = look_seconds
        self._pings: dict[str, Any] = {}
        self._end = threading.Event()

    def __enter__(self) -> Watchdog:
        if self._patience is not None:
            threading.Thread(target=self._watch, args=(self._patience,), name="turnkey-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    def _watch(self, patience: float) -> None:
        last, since, warned = self._progress(), time.monotonic(), False
        while not self._end.wait(min(self._look_seconds, patience)):
            dead, silent = self.examine()
            if self._end.is_set():
                return
            if dead:
                died = "a process died" if len(dead) == 1 else "processes died"
                self._report(f"{died}: {'; '.join(f'{name}: {why}' for name, why in dead.items())}")
                return
            if (now := self._progress()) != last:
                last, since, warned = now, time.monotonic(), False
            elif time.monotonic() - since >= patience and not warned:
                busy = f"; without an answer: {', '.join(silent)}" if silent else ""
                warning = "nothing has moved for %g s (turnkey.stop.patience), but every process is alive%s"
                logger.warning(warning, patience, busy)
                warned = True

    def examine(self) -> tuple[dict[str, str], list[str]]:
        """The dead processes, with the reason, and those that have not answered yet.

        A process that computes is asked once, not once more at every look: its calls would pile up.
        """
        actors = self._actors()
        pings = {name: self._pings.get(name) or actor.__ray_call__.remote(health) for name, actor in actors.items()}
        ready, _ = (
            ray.wait([*pings.values()], num_returns=len(pings), timeout=self._look_seconds / 2) if pings else ([], [])
        )
        self._pings = {name: ping for name, ping in pings.items() if ping not in ready}
        dead, silent = {}, [*self._pings]
        for name, ping in pings.items():
            if ping not in ready:
                continue
            try:
                why = ray.get(ping)
            except ActorUnavailableError:  # its network fails, for now
                silent.append(name)
                continue
            except (RayActorError, OutOfMemoryError) as error:  # the second: Ray killed it where memory ran out
                why = " ".join(str(error).split("\n")[0].split()) or "its process is gone"
            if why:
                dead[name] = why
        return dead, silent


def health(actor: Any) -> str | None:
    """Runs inside an actor; returns why it counts as dead, or None. An inference server can outlive its engine."""
    engine = getattr(actor, "engine", None)
    return "its engine is dead" if getattr(engine, "errored", False) is True else None
