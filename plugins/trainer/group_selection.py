"""Which groups of a batch are trained, when not all are (``turnkey.groups``)."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_turnkey.plugins.config.groups import GroupsConfig
from verl_turnkey.plugins.credit.row_turns import split_key
from verl_turnkey.plugins.trainer.allocation import Allocation
from verl_turnkey.plugins.trainer.outcomes import Outcome, outcomes
from verl_turnkey.plugins.trainer.replay import Replay
from verl_turnkey.plugins.trainer.spread import most_spread, spread
from verl_turnkey.plugins.verl_api.internals import partition_of


class GroupSelection:
    """The groups of the current batch that are trained; stored ones join them, and their outcomes are remembered."""

    def __init__(self, options: GroupsConfig, allocation: Allocation, replay: Replay) -> None:
        self._options, self._allocation, self._replay = options, allocation, replay
        self.groups: int | None = None
        """groups that are left of the current batch; None: nothing was left out"""
        self.left_out: Counter[str] = Counter()
        """episodes with rows of each group that was left out of the current batch"""

    def select(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """The rows of ``batch`` that are trained, once its rewards are there, a reward model's too."""
        self.groups, self.left_out = None, Counter()
        if self._options.remembers or self._options.stores or self._options.keep < 1:
            by_group = outcomes(batch)
            if self._options.remembers:
                self._allocation.learn(batch, by_group)
                metrics.update(self._allocation.metrics)
            if self._options.keep < 1:
                batch = self._keep(batch, by_group, metrics)
            if self._options.stores:
                batch = self._replay.extend(batch, by_group, metrics)
        return batch

    def _keep(self, batch: KVBatchMeta, by_group: dict[str, list[Outcome]], metrics: dict[str, Any]) -> KVBatchMeta:
        """``batch`` without the groups that are not trained, whose rows leave the queue.

        A group whose episodes all failed is not trained. The batch has another one: see ``starvation.py``.
        """
        spreads = {group: spread([each.score for each in played]) for group, played in by_group.items() if played}
        kept = most_spread(spreads, self._options.keep, self._options.keep_by)
        failed = 1 - len(spreads) / len(by_group)
        metrics.update({"groups/failed": failed, **_metrics([*chain(*by_group.values())], spreads, kept)})
        self.groups, chosen = len(kept), set(kept)
        left_out = [key for key in batch.keys if split_key(key)[0] not in chosen]
        if not left_out:
            return batch
        self.left_out.update(group for group, _ in {split_key(key)[:2] for key in left_out})
        tq.kv_clear(keys=left_out, partition_id=partition_of(batch))
        return batch.select_keys([key for key in batch.keys if split_key(key)[0] in chosen])


def _metrics(played: list[Outcome], spreads: dict[str, float], kept: list[str]) -> dict[str, float]:
    """Those of ``episode/`` are of the kept groups; here are the means of all episodes as well."""
    total = sum(spreads.values())
    return {
        "groups/kept": len(kept) / len(spreads),
        "groups/kept_spread": sum(spreads[group] for group in kept) / total if total else 0.0,
        "groups/spread/mean": float(np.mean([*spreads.values()])),
        "groups/without_spread": float(np.mean([value == 0 for value in spreads.values()])),
        "groups/composed_return/mean": float(np.mean([each.score for each in played])),
        "groups/solved": float(np.mean([each.solved for each in played])),
    }
