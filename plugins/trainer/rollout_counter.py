"""Counts the rollouts of a batch that left no row. A data row may set its number of rollouts (``__rollout_n__``)."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tensordict import TensorDict

from verl_turnkey.plugins.checks.files import ROLLOUTS
from verl_turnkey.plugins.credit.row_turns import split_key
from verl_turnkey.plugins.credit.rows import REPLAYED
from verl_turnkey.plugins.notices import logger
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta

REMEMBERED = 100_000
"""prompts whose number of rollouts is kept; those of dropped groups never come back"""


class RolloutCounter:
    """Remembers the prompts that a replay buffer samples, including those without any row.

    Args:
        buffer: verl's replay buffer, or a user's, which may lack ``_materialize_batch``.
        prompts: number of prompts in a batch.
        rollouts: number of rollouts of a prompt that sets none.
    """

    def __init__(self, buffer: Any, prompts: int, rollouts: int) -> None:
        self._prompts, self._rollouts = prompts, rollouts
        self._own: dict[str, int] = {}
        self._varies = False
        self._sampled: list[str] = []
        self._materialize = getattr(buffer, "_materialize_batch", None)
        if self._materialize is not None:
            buffer._materialize_batch = self._on_batch

    def submit(self, batch: TensorDict) -> None:
        """Store the numbers of rollouts that the prompts of ``batch`` set."""
        if ROLLOUTS in batch:
            self._varies = True
            self._own.update(zip(map(str, batch["uid"]), map(int, batch[ROLLOUTS]), strict=True))
            while len(self._own) > REMEMBERED:
                del self._own[next(iter(self._own))]

    def _on_batch(self, partition_id: str, selected_prompt_uids: list[str], partition_snapshot: Any) -> Any:
        assert self._materialize is not None
        if partition_id == "train":
            self._sampled = list(selected_prompt_uids)
        return self._materialize(partition_id, selected_prompt_uids, partition_snapshot)

    def missing(self, batch: KVBatchMeta, left_out: Counter[str], step: int) -> dict[str, float]:
        """The metric of the rollouts of the current batch without a row, and a warning if there are any.

        An agent loop that raises leaves no row: verl then silently trains on the rest of its group. ``left_out``:
        rollouts with rows of the groups that are not trained.
        """
        played = [
            key
            for key, tag in zip(batch.keys, batch.tags, strict=True)
            if not tag.get("is_padding", False) and not tag.get(REPLAYED, False)
        ]
        with_rows = Counter(group for group, _ in {split_key(key)[:2] for key in played}) + left_out
        prompts = {*self._sampled, *with_rows}
        self._sampled = []
        expected = self._rollouts * max(0, self._prompts - len(prompts))
        for uid in prompts:
            # After a resume, the number that a prompt had set is unknown.
            expected += self._own.pop(uid, with_rows[uid] if self._varies else self._rollouts)
        missing = max(0, expected - with_rows.total())
        if missing:
            logger.warning(
                "%d of %d episodes of step %d left no row: the agent loop raised, see the log of its worker",
                *(missing, missing + with_rows.total(), step),
            )
        return {"episode/missing": float(missing)}
