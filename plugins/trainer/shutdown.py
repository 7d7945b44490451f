"""The trainer's side of a stop: a checkpoint where the step ends, and a watchdog over the processes of the run.

The watchdog is a thread that looks for dead processes: verl waits for some of them for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.shutdown import channel
from verl_turnkey.plugins.trainer.checkpointing import Checkpointing
from verl_turnkey.plugins.trainer.logging import TrainingLog
from verl_turnkey.plugins.trainer.starvation import StarvedError
from verl_turnkey.plugins.verl_api import internals, queue

LOOK_SECONDS = 20.0
"""between two looks at the processes, half of it for their answers: one that comes later is read at the next look"""


class Watchdog:
    """Calls ``report`` with a sentence about dead processes, in whatever phase of a step they died.

    verl notices a dead process at the next call whose answer it waits for; for some, such as a server between two
    rollouts, it waits for ever. A process that computes does not answer, and is not dead.

    Args:
        patience: seconds without progress until a warning that every process is alive; None: no watchdog.
        progress: anything that differs from what it was when something has moved.
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
                self._report("dead are: " + "; ".join(f"{name}: {why}" for name, why in dead.items()))
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
    """Inside an actor: what is dead about it. An inference server outlives the process of its engine."""
    engine = getattr(actor, "engine", None)
    return "its engine is dead" if getattr(engine, "errored", False) is True else None


class Shutdown:
    """How the run ends before its last step."""

    def __init__(self, trainer: PPOTrainer, checkpointing: Checkpointing, log: TrainingLog) -> None:
        self._trainer, self._checkpointing, self._log = trainer, checkpointing, log
        self._begun = False
        self._controller: Any = None

    def watchdog(self, patience: float | None) -> Watchdog:
        """A watchdog over the processes, while the first weights are sent and during verl's loop.

        ``patience``: ``turnkey.stop.patience``.
        """
        self._controller = queue.controller()  # while it lives: once it is dead, its name leads nowhere
        return Watchdog(patience, self.progress, lambda: dict(self.processes()), self.died)

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Save if the step stops the run, and right after it if a signal arrived: validation may take too long."""
        try:
            yield
        except (StarvedError, channel.StoppedError):
            self._checkpointing.save_stopping(self._trainer.global_steps - 1)
            raise
        if channel.get("signal") and self._trainer.config.trainer.save_freq > 0:
            self._trainer._save_checkpoint()

    def begin_step(self) -> None:
        """Report the first step to the driver; stop here if a signal arrived: the metrics of the last step are logged.

        Raises:
            StoppedError: says which checkpoint exists.
        """
        if not self._begun:
            channel.put("begun", str(self._trainer.global_steps))
            self._begun = True
        if signal := channel.get("signal"):
            last_step = self._trainer.global_steps - 1
            self._checkpointing.save_stopping(last_step)
            raise channel.StoppedError(f"{signal}: stopped after step {last_step}; {self._newest()}")

    def _newest(self) -> str:
        saved = self._checkpointing.saved
        return f"the newest checkpoint is global_step_{saved}" if saved else "there is no checkpoint"

    def progress(self) -> Any:
        """The step, its finished phases, and the numbers of rollouts."""
        counts = [
            len(keys)
            for name in ("partitions", "finished_keys", "failure_keys")
            for keys in list(getattr(self._trainer.replay_buffer, name, {}).values())
        ]
        return self._trainer.global_steps, tuple(getattr(self._trainer, "timing_raw", {}).items()), tuple(counts)

    def processes(self) -> Iterator[tuple[str, Any]]:
        """The name and the handle of each process of the run."""
        groups = {"actor_rollout_wg": "trainer", "critic_wg": "critic", "ref_policy_wg": "reference model"}
        for attribute, name in groups.items():
            for i, worker in enumerate(getattr(getattr(self._trainer, attribute, None), "workers", None) or []):
                yield f"process {i} of the {name}", worker
        for i, worker in enumerate(internals.loop_workers(getattr(self._trainer, "agent_loop_manager", None))):
            yield f"agent-loop worker {i}", worker
        servers = [
            server
            for manager in internals.server_managers(self._trainer)
            for replica in manager.get_replicas()
            for server in replica.servers
        ]
        for i, server in enumerate(servers):
            yield f"inference server {i}", server
        if self._controller is not None:
            yield "TransferQueue's controller", self._controller

    def died(self, reason: str) -> None:
        """Report a dead process: the driver ends the run."""
        logger.warning(reason)
        self._log.keep()
        channel.put("dead", f"{reason}; {self._newest()}")
