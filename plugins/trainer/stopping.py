"""The trainer's side of a stop: a checkpoint where the step ends, and a watchdog over the processes of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from transfer_queue import KVBatchMeta

from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.stopping import channel
from verl_turnkey.plugins.stopping.watchdog import Watchdog
from verl_turnkey.plugins.verl_api import internals


class Stopping:
    """Mixin of :class:`verl_turnkey.plugins.trainer.trainer.TurnkeyTrainer`."""

    config: Any
    turnkey: TurnkeyConfig
    global_steps: int
    agent_loop_manager: Any
    replay_buffer: Any
    timing_raw: dict[str, float]
    _saved: int | None
    _begun: bool = False
    _save_checkpoint: Callable[[], None]
    _save_stopping: Callable[[int], None]
    _keep_log: Callable[[], None]

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's loop, watched."""
        self.agent_loop_manager = agent_loop_manager
        with Watchdog(self.turnkey.stop.patience, self._progress, lambda: dict(self._processes()), self._died):
            super().fit(agent_loop_manager)  # type: ignore[misc]

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """verl's own; saves right after it if the run has to stop, since validation may take longer than there is."""
        batch = super().step(metrics, timing_raw)  # type: ignore[misc]
        if channel.told("signal") and self.config.trainer.save_freq > 0:
            self._save_checkpoint()
        return batch

    def on_step_begin(self) -> None:
        """Tell the driver of the first step; stop here if it got a signal: metrics of the step before are logged.

        Raises:
            StoppedError: says which checkpoint there is.
        """
        if not self._begun:
            channel.tell("begun", str(self.global_steps))
            self._begun = True
        if signal := channel.told("signal"):
            done = self.global_steps - 1
            self._save_stopping(done)
            raise channel.StoppedError(f"{signal}: stopped after step {done}; {self._newest()}")
        super().on_step_begin()  # type: ignore[misc]

    def _newest(self) -> str:
        return f"the newest checkpoint is global_step_{self._saved}" if self._saved else "there is no checkpoint"

    def _progress(self) -> Any:
        """Step, the phases of it that are over, and how many rollouts there are."""
        buffer = self.replay_buffer
        counts = [
            len(held)
            for name in ("partitions", "finished_keys", "failure_keys")
            for held in list(getattr(buffer, name, {}).values())
        ]
        return self.global_steps, tuple(getattr(self, "timing_raw", {}).items()), tuple(counts)

    def _processes(self) -> Iterator[tuple[str, Any]]:
        groups = {"actor_rollout_wg": "trainer", "critic_wg": "critic", "ref_policy_wg": "reference model"}
        for attribute, name in groups.items():
            for i, worker in enumerate(getattr(getattr(self, attribute, None), "workers", None) or []):
                yield f"process {i} of the {name}", worker
        for i, worker in enumerate(internals.loop_workers(self.agent_loop_manager)):
            yield f"agent-loop worker {i}", worker
        servers = [
            server
            for manager in internals.server_managers(self)
            for replica in manager.get_replicas()
            for server in replica.servers
        ]
        for i, server in enumerate(servers):
            yield f"inference server {i}", server

    def _died(self, why: str) -> None:
        logger.warning(why)
        self._keep_log()
        channel.tell("dead", f"{why}; {self._newest()}")
