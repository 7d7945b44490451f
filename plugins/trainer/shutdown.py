"""The trainer's side of a stop: a checkpoint where the step ends, and a watchdog over the processes of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.shutdown import channel
from verl_turnkey.plugins.shutdown.watchdog import Watchdog
from verl_turnkey.plugins.trainer.checkpointing import Checkpointing
from verl_turnkey.plugins.trainer.logging import TrainingLog
from verl_turnkey.plugins.trainer.starvation import StarvedError
from verl_turnkey.plugins.verl_api import internals, queue


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
        try:
            self._log.keep()
        finally:
            channel.put("dead", f"{reason}; {self._newest()}")
