"""Counts the rollouts of a batch that left no row. A data row may set its number of rollouts (``__rollout_n__``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict

from verl_turnkey.plugins.checks.groups import COLUMN


class Asked:
    """Remembers the prompts that a replay buffer samples, including those without any row.

    Args:
        buffer: verl's replay buffer, or a user's, which may lack ``_materialize_batch``.
        prompts: number of prompts in a batch.
        each: rollouts of a prompt without a number of its own.
    """

    def __init__(self, buffer: Any, prompts: int, each: int) -> None:
        self._prompts, self._each = prompts, each
        self._own: dict[str, int] = {}
        self._varies = False
        self._sampled: list[str] = []
        self._materialize = getattr(buffer, "_materialize_batch", None)
        if self._materialize is not None:
            buffer._materialize_batch = self._on_batch

    def submit(self, batch: TensorDict) -> None:
        """Store the numbers of rollouts that the prompts of ``batch`` set."""
        if COLUMN in batch:
            self._varies = True
            self._own.update(zip(batch["uid"], map(int, batch[COLUMN]), strict=True))

    def _on_batch(self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: Any) -> Any:
        assert self._materialize is not None
        if partition_id == "train":
            self._sampled = list(selected_prompt_uids)
        return self._materialize(partition_id, selected_prompt_uids, partition_snapshot)

    def missing(self, found: Mapping[str, int]) -> int:
        """Number of rollouts of the current batch without a row; ``found``: prompt -> rollouts with rows."""
        prompts = {*self._sampled, *found}
        self._sampled = []
        asked = self._each * max(0, self._prompts - len(prompts))
        for uid in prompts:
            # The number that a prompt from before a resume had set is no longer known.
            asked += self._own.pop(uid, found.get(uid, 0) if self._varies else self._each)
        return max(0, asked - sum(found.values()))
