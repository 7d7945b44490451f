"""Replaces batches whose episodes all failed, with pauses, and in the end stops the run.

The asynchronous trainers, and group filtering in all trainers, drop groups of rollouts and request others until a batch
is complete. verl would do so forever, and the trainer's log would not show that all of them fail. A batch without a
played episode trains nothing.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable
from typing import Any

from omegaconf import OmegaConf
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl_turnkey.plugins.credit.rows import split_key
from verl_turnkey.plugins.shutdown import channel
from verl_turnkey.plugins.trainer.outcomes import PlayedOnly, failures
from verl_turnkey.plugins.verl_api import internals
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, Partition, batch_of, partition_of

logger = logging.getLogger(__name__)

ALIKE = 3
"""batches of groups that all end alike before time counts: a single large batch may take longer than the patience"""
FIRST_PAUSE = 2.0
"""seconds; each further pause is twice as long"""
LOOK_SECONDS = 1.0
"""after which a pause looks for a signal: the time until the run is killed may be shorter than the patience"""


class StarvedError(RuntimeError):
    """Too many episodes failed for the run to continue; the message says why."""


class Patience:
    """Pauses between attempts, each twice as long as the last, until no episode was played for ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.restore()

    def restore(self) -> None:
        """An episode was played: start over."""
        self._end: float | None = None
        self._pause = FIRST_PAUSE

    def lose(self, reason: str) -> None:
        """Wait before the next attempt.

        Raises:
            StarvedError: no time is left for another.
            StoppedError: a signal arrived.
        """
        _stop_on_signal(reason)
        now = time.monotonic()
        self._end = now + self._seconds if self._end is None else self._end
        if now >= self._end:
            raise StarvedError(reason)
        pause = min(self._pause, self._end - now)
        logger.warning("%s\nTrying again in %.0f s.", reason, pause)
        end = now + pause
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, LOOK_SECONDS))
            _stop_on_signal(reason)
        self._pause *= 2


class StarvationGuard:
    """Watches which groups a replay buffer, verl's or a user's, drops in a step, and which batches it returns.

    An attempt fails when more than twice the groups of a batch are lost, because the agent loop raised or because all
    their episodes failed. Of batches of groups whose episodes all end alike, group filtering may drop fewer than
    ``algorithm.filter_groups.max_num_gen_batches``; without that key, fewer than :data:`ALIKE` if no group was kept and
    they took longer than ``seconds`` (``turnkey.env.patience``).
    """

    def __init__(self, trainer: PPOTrainer, seconds: float) -> None:
        config, buffer = trainer.config, trainer.replay_buffer
        self._trainer, self._patience, self._seconds = trainer, Patience(seconds), seconds
        self._groups, self._most = config.data.train_batch_size, 2 * config.data.train_batch_size
        self._batches = max(0, OmegaConf.select(config, "algorithm.filter_groups.max_num_gen_batches") or 0)
        self._begin(0)
        self._buffer, self._sample = buffer, buffer.sample
        buffer.sample = self._on_sample
        if hasattr(buffer, "_evict_terminal_groups"):  # a user's own sampler may lack it
            self._filter = PlayedOnly(buffer)
            self._evict = buffer._evict_terminal_groups
            buffer._evict_terminal_groups = self._on_eviction

    def _begin(self, step: int) -> None:
        """Reset the counts for ``step``."""
        self._step = step
        self._raised = self._dead = self._equal = 0
        self._since, self._reported = time.monotonic(), 0
        self._reasons: set[str] = set()

    def _step_is(self, step: int) -> None:
        if step != self._step:
            self._begin(step)

    def _on_sample(self, global_steps: int, partition_id: str, batch_size: int) -> Any:
        """A batch with a played episode; batches without any are replaced."""
        request = {"global_steps": global_steps, "partition_id": partition_id, "batch_size": batch_size}
        if partition_id == "val":
            return self._sample(**request)
        self._step_is(global_steps)
        while True:
            try:
                batch, metrics = self._sample(**request)
            except RuntimeError as error:
                if internals.NO_TRAJECTORIES not in str(error):
                    raise
                batch, metrics = self._rowless(partition_id), {}
            reasons = _nothing_played(batch)
            if not reasons:
                self._patience.restore()
                return batch, metrics
            if batch.keys:
                Partition(partition_id).clear(batch.keys)
            number = len(batch) or "the"
            self._lose(f"all {number} episodes of a batch failed:\n{listed(reasons)}")
            size = self._trainer.config.data.get("gen_batch_size") or self._groups  # verl provides multiples of it
            self._trainer._add_prompts_to_generate(math.ceil(batch_size / size) * size)

    def _rowless(self, partition_id: str) -> KVBatchMeta:
        """An empty batch, after prompts without rows are cleared: verl's synchronous buffer raises an error on them."""
        terminal = self._buffer.finished_keys[partition_id] | self._buffer.failure_keys[partition_id]
        played = {split_key(key)[0] for key in self._buffer.partitions[partition_id]}
        Partition(partition_id).clear(sorted(terminal - played))
        return batch_of(partition_id, {})

    def _on_eviction(self, global_steps: int, partition_id: str, eviction_reasons: tuple[Any, ...]) -> Any:
        self._step_is(global_steps)
        _, filtered, raised, _ = eviction_reasons
        self._raised += len(raised)
        if self._raised > self._most:
            self._lose(
                f"{self._raised} groups of rollouts were lost because the agent loop raised in them: see the logs of "
                "the agent-loop workers"
            )
        dead = {uid: self._filter.dead.pop(uid) for uid in filtered - raised if uid in self._filter.dead}
        self._reasons.update(*dead.values())
        self._dead += len(dead)
        self._equal += len(filtered - raised) - len(dead)
        if self._dead > max(self._most, self._equal):
            self._lose(
                f"all episodes of {self._dead} groups failed, and group filtering would replace them forever:\n"
                f"{listed(self._reasons)}"
            )
        self._judge_alike(partition_id)
        return self._evict(global_steps, partition_id, eviction_reasons)

    def _judge_alike(self, partition_id: str) -> None:
        """Report batches that group filtering dropped as a whole; verl would replace them silently and forever.

        Raises:
            StarvedError: there were too many.
            StoppedError: a signal arrived, and the step has no groups to finish with.
        """
        dropped = self._equal // max(1, self._groups)
        judged = self._buffer._dapo_classification_cache[partition_id].values()
        some_kept = any(value is None for value in judged)
        batches = f"{dropped} {'batch' if dropped == 1 else 'batches'} of {self._groups}"
        summary = (
            f"step {self._step}: group filtering dropped {self._equal} groups, whose episodes all ended alike "
            f"({batches}), and kept {'some' if some_kept else 'none'}"
        )
        if not some_kept and dropped:
            _stop_on_signal(summary)
        if dropped > self._reported:
            self._reported = dropped
            logger.warning("%s. More tasks are played", summary)
        too_long = not some_kept and dropped >= ALIKE and time.monotonic() - self._since > self._seconds
        if dropped and (dropped >= self._batches if self._batches else too_long):
            limit = f"algorithm.filter_groups.max_num_gen_batches={self._batches}"
            raise StarvedError(
                f"{summary}: {limit if self._batches else f'longer than turnkey.env.patience={self._seconds:g} s'}. "
                "The tasks are all too hard or too easy for the policy, or a group has too few episodes "
                "(actor_rollout_ref.rollout.n)"
            )

    def _lose(self, reason: str) -> None:
        self._patience.lose(f"step {self._step}: {reason}")
        self._begin(self._step)


def _stop_on_signal(state: str) -> None:
    """Stop the run if its driver got a signal. ``state``: of the step, for the message.

    Raises:
        StoppedError: it did.
    """
    if name := channel.get("signal"):
        raise channel.StoppedError(f"{name}: {state}")


def _nothing_played(batch: KVBatchMeta) -> set[str]:
    """The reasons if all episodes of the batch failed; else empty."""
    if any(split_key(key)[2] for key in batch.keys):  # a failed episode is a single row
        return set()
    reasons = failures(batch.keys, partition_of(batch).name).values()
    if not reasons:
        return {"the agent loop left no rows: it raised in every episode, see the logs of the agent-loop workers"}
    return {reason for reason in reasons if reason} if None not in reasons else set()


def listed(reasons: Iterable[str]) -> str:
    """At most five of the reasons, one per line."""
    return "\n".join(f"  {reason}" for reason in sorted(set(reasons))[:5])
