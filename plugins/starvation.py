"""Stops a run whose episodes are lost faster than they can be replaced: verl would replace them for ever.

The asynchronous trainers, and group filtering in all of them, throw groups of rollouts away and ask for others before a
batch is made: nothing downstream, and no log of the trainer, would ever tell that none of them is any good.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.plugins.rows import failure
from verl_turnkey.plugins.turns import split_key

# In the reason of an episode that found its host without any processes left to lose.
EXHAUSTED = f"{EnvironmentFailure('restarts', '')}"


def listed(reasons: Iterable[str | None]) -> str:
    """A few reasons, one per line."""
    return "\n".join(f"  {reason}" for reason in sorted({str(reason) for reason in reasons})[:5])


class Watch:
    """Looks at what a replay buffer throws away between two batches.

    Args:
        buffer: verl's, or one of the user's own with the same two methods.
        most: groups that may be lost because the agent loop raised, or because all their episodes failed.
    """

    def __init__(self, buffer: Any, most: int) -> None:
        self._buffer, self._most = buffer, most
        self._raised, self._dead = 0, 0
        self._reasons: set[str] = set()
        self._evict, self._hand_out = buffer._evict_terminal_groups, buffer._materialize_batch
        buffer._evict_terminal_groups, buffer._materialize_batch = self._on_eviction, self._on_batch

    def _on_batch(self, partition_id: str, *args: Any, **kwargs: Any) -> KVBatchMeta:
        if partition_id != "val":
            self._raised, self._dead = 0, 0
            self._reasons.clear()
        return self._hand_out(partition_id, *args, **kwargs)

    def _on_eviction(self, global_steps: int, partition_id: str, eviction_reasons: tuple[Any, ...]) -> Any:
        _, filtered, raised, _ = eviction_reasons
        self._raised += len(raised)
        if self._raised > self._most:
            raise RuntimeError(
                f"step {global_steps}: {self._raised} groups of rollouts were lost since the last batch because the "
                "agent loop raised in them: see the logs of the agent-loop workers"
            )
        for reasons in self._failures(partition_id, filtered - raised):
            if exhausted := [reason for reason in reasons if EXHAUSTED in reason]:
                raise RuntimeError(f"step {global_steps}: {exhausted[0]}")
            self._dead += 1
            self._reasons.update(reasons)
        if self._dead > self._most:
            raise RuntimeError(
                f"step {global_steps}: all episodes of {self._dead} groups failed since the last batch (group "
                f"filtering would replace them for ever):\n{listed(self._reasons)}"
            )
        return self._evict(global_steps, partition_id, eviction_reasons)

    def _failures(self, partition_id: str, uids: set[str]) -> list[list[str]]:
        """Why, for each group of which all episodes failed: such an episode is a single row."""
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
