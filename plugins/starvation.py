"""Stops a run whose episodes are lost faster than they can be replaced: verl would replace them for ever.

The asynchronous trainers, and group filtering in all of them, throw groups of rollouts away and ask for others before a
batch is made: nothing downstream, and no log of the trainer, would ever tell that none of them is any good.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transfer_queue as tq

from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.plugins.rows import failure
from verl_turnkey.plugins.turns import split_key

# In the reason of an episode that found its host without any processes left to lose.
EXHAUSTED = f"{EnvironmentFailure('restarts', '')}"


def listed(reasons: Iterable[str | None]) -> str:
    """A few reasons, one per line."""
    return "\n".join(f"  {reason}" for reason in sorted({str(reason) for reason in reasons})[:5])


def stop_when_exhausted(step: int, reasons: Iterable[str | None]) -> None:
    """Raise when a host has no processes left: none of its episodes will ever begin again."""
    for reason in reasons:
        if reason and EXHAUSTED in reason:
            raise RuntimeError(f"step {step}: {reason}")


class Watch:
    """Looks at what a replay buffer throws away in a training step.

    Args:
        buffer: verl's, or one of the user's own with the same method.
        most: groups that may be lost because the agent loop raised, or because all their episodes failed.
    """

    def __init__(self, buffer: Any, most: int) -> None:
        self._buffer, self._most = buffer, most
        self._begin(0)
        self._evict = buffer._evict_terminal_groups
        buffer._evict_terminal_groups = self._on_eviction

    def _begin(self, step: int) -> None:
        self._step = step
        self._raised = self._dead = self._equal = 0
        self._reasons: set[str] = set()

    def _on_eviction(self, global_steps: int, partition_id: str, eviction_reasons: tuple[Any, ...]) -> Any:
        if global_steps != self._step:
            self._begin(global_steps)
        _, filtered, raised, _ = eviction_reasons
        self._raised += len(raised)
        if self._raised > self._most:
            raise RuntimeError(
                f"step {global_steps}: {self._raised} groups of rollouts were lost because the agent loop raised in "
                "them: see the logs of the agent-loop workers"
            )
        failed = self._failures(partition_id, filtered - raised)
        for reasons in failed:
            stop_when_exhausted(global_steps, reasons)
            self._reasons.update(reasons)
        self._dead += len(failed)
        self._equal += len(filtered - raised) - len(failed)
        if self._dead > max(self._most, self._equal):
            raise RuntimeError(
                f"step {global_steps}: all episodes of {self._dead} groups failed, and group filtering would replace "
                f"them for ever:\n{listed(self._reasons)}"
            )
        return self._evict(global_steps, partition_id, eviction_reasons)

    def _failures(self, partition_id: str, uids: set[str]) -> list[list[str]]:
        """Why, for each group of which all episodes failed: such an episode is a single row."""
        if not uids:
            return []
        groups: dict[str, list[str]] = {uid: [] for uid in uids}
        for key in self._buffer.partitions[partition_id]:
            if (uid := split_key(key)[0]) in groups:
                groups[uid].append(key)
        single = {uid: keys for uid, keys in groups.items() if keys and all(split_key(key)[2] == 0 for key in keys)}
        if not single:
            return []
        keys = [key for group in single.values() for key in group]
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["extra_fields"])
        reason = dict(zip(keys, (failure(extra, True) for extra in data.pop("extra_fields").tolist()), strict=True))
        found = [[reason[key] for key in group] for group in single.values()]
        return [[text for text in reasons if text] for reasons in found if all(reasons)]
