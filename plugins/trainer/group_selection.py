"""Selects the groups of a batch that are trained (``turnkey.groups``)."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import numpy as np

from verl_turnkey.plugins.config.training import GroupsConfig
from verl_turnkey.plugins.credit.row_turns import split_key
from verl_turnkey.plugins.trainer.allocation import Allocation
from verl_turnkey.plugins.trainer.outcomes import Outcome, outcomes
from verl_turnkey.plugins.trainer.replay import Replay
from verl_turnkey.plugins.trainer.spread import most_spread, spread
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, part_of, partition_of


class GroupSelection:
    """Selects the groups of the current batch to train, adds stored ones, and remembers outcomes."""

    def __init__(self, options: GroupsConfig, allocation: Allocation, replay: Replay) -> None:
        self._options, self._allocation, self._replay = options, allocation, replay
        self.groups: int | None = None
        """number of kept groups of the current batch; None: all"""
        self.left_out: Counter[str] = Counter()
        """episodes with rows of each dropped group of the current batch"""

    def select(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        """The rows of ``batch`` to train, once its rewards are complete, including those of a reward model."""
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

        A group whose episodes all failed is not trained; ``starvation.py`` ensures that the batch has another one.
        """
        spreads = {group: spread([outcome.score for outcome in played]) for group, played in by_group.items() if played}
        kept = most_spread(spreads, self._options.keep, self._options.keep_by)
        failed = 1 - len(spreads) / len(by_group)
        metrics.update({"groups/failed": failed, **_metrics([*chain(*by_group.values())], spreads, kept)})
        self.groups, chosen = len(kept), set(kept)
        left_out = [key for key in batch.keys if split_key(key)[0] not in chosen]
        if not left_out:
            return batch
        self.left_out.update(group for group, _ in {split_key(key)[:2] for key in left_out})
        partition_of(batch).clear(left_out)
        return part_of(batch, [i for i, key in enumerate(batch.keys) if split_key(key)[0] in chosen])


def _metrics(played: list[Outcome], spreads: dict[str, float], kept_groups: list[str]) -> dict[str, float]:
    """Metrics of all episodes; those under ``episode/`` are of the kept groups only."""
    total = sum(spreads.values())
    return {
        "groups/kept": len(kept_groups) / len(spreads),
        "groups/kept_spread": sum(spreads[group] for group in kept_groups) / total if total else 0.0,
        "groups/spread/mean": float(np.mean([*spreads.values()])),
        "groups/without_spread": float(np.mean([value == 0 for value in spreads.values()])),
        "groups/composed_return/mean": float(np.mean([outcome.score for outcome in played])),
        "groups/solved": float(np.mean([outcome.solved for outcome in played])),
    }
