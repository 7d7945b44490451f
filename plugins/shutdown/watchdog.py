"""A thread of the trainer that looks for dead processes when nothing moves: verl waits for them for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

from verl_turnkey.plugins.notices import logger

PING_SECONDS = 60.0
"""how long an actor may take to answer; one that computes does not answer, and is not dead"""


class Watchdog:
    """Calls ``report`` with a sentence about dead processes, once nothing has moved for ``patience`` seconds.

    Args:
        patience: seconds; None: never.
        progress: anything that differs from what it was when something has moved.
        actors: name -> handle of each process of the run.
        report: called once, in the watchdog's thread.
        ping_seconds: see :data:`PING_SECONDS`.
    """

    def __init__(
        self,
        patience: float | None,
        progress: Callable[[], Any],
        actors: Callable[[], Mapping[str, Any]],
        report: Callable[[str], None],
        ping_seconds: float = PING_SECONDS,
    ) -> None:
        self._patience, self._progress, self._actors, self._report = patience, progress, actors, report
        self._ping_seconds = ping_seconds
        self._end = threading.Event()

    def __enter__(self) -> Watchdog:
        if self._patience is not None:
            threading.Thread(target=self._watch, args=(self._patience,), name="turnkey-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()

    def _watch(self, patience: float) -> None:
        still = f"nothing has moved for {patience:g} s (turnkey.stop.patience)"
        seen, since, warned = self._progress(), time.monotonic(), False
        while not self._end.wait(patience / 20):
            if (now := self._progress()) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since >= patience:
                dead, silent = examine(self._actors(), self._ping_seconds)
                if self._end.is_set():
                    return
                if dead:
                    listed = "; ".join(f"{name}: {why}" for name, why in dead.items())
                    self._report(f"{still}, and dead are: {listed}")
                    return
                if not warned:
                    busy = f"; no answer in {self._ping_seconds:g} s: {', '.join(silent)}" if silent else ""
                    logger.warning("%s, but every process is alive%s", still, busy)
                    warned = True
                since = time.monotonic()


def examine(actors: Mapping[str, Any], seconds: float) -> tuple[dict[str, str], list[str]]:
    """The dead of ``actors``, with the reason, and those that do not answer within ``seconds``."""
    calls = {actor.__ray_call__.remote(health): name for name, actor in actors.items()}
    ready, waiting = ray.wait(list(calls), num_returns=len(calls), timeout=seconds) if calls else ([], [])
    dead, silent = {}, [calls[call] for call in waiting]
    for call in ready:
        try:
            why = ray.get(call)
        except ActorUnavailableError:  # its network fails, for now
            silent.append(calls[call])
            continue
        except (RayActorError, OutOfMemoryError) as error:  # the second: Ray killed it where memory ran out
            why = " ".join(str(error).split("\n")[0].split()) or "its process is gone"
        if why:
            dead[calls[call]] = why
    return dead, silent


def health(actor: Any) -> str | None:
    """Inside an actor: what is dead about it. An inference server outlives the process of its engine."""
    engine = getattr(actor, "engine", None)
    return "its engine is dead" if getattr(engine, "errored", False) is True else None
