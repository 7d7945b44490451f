"""Which groups of a batch are trained, when not all are (``turnkey.groups``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.credit.row_turns import split_key
from verl_turnkey.plugins.trainer.outcomes import Outcome, outcomes
from verl_turnkey.plugins.trainer.spread import most_spread, spread


class Kept:
    """Mixin of :class:`verl_turnkey.plugins.trainer.trainer.TurnkeyTrainer`."""

    turnkey: TurnkeyConfig
    _learn_outcomes: Callable[[KVBatchMeta, dict[str, list[Outcome]]], None]
    _replay: Callable[[KVBatchMeta, dict[str, list[Outcome]], dict[str, Any]], KVBatchMeta]
    _allotted: dict[str, float]
    _groups: int | None = None
    """groups that are left of the current batch; None: nothing was left out"""
    _left_out: Counter[str]
    """episodes with rows of each group that was left out of the current batch"""

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> KVBatchMeta:
        """verl's first step after the rewards of a batch are there, a reward model's too: the kept groups alone."""
        self._groups, self._left_out = None, Counter()
        asked = self.turnkey.groups
        if asked.remembers or asked.stores or asked.keep < 1:
            found = outcomes(batch)
            if asked.remembers:
                self._learn_outcomes(batch, found)
                metrics.update(self._allotted)
            if asked.keep < 1:
                batch = self._keep(batch, found, metrics)
            if asked.stores:
                batch = self._replay(batch, found, metrics)
        return super()._balance_batch(batch, metrics, *args, **kwargs)  # type: ignore[misc]

    def _keep(self, batch: KVBatchMeta, found: dict[str, list[Outcome]], metrics: dict[str, Any]) -> KVBatchMeta:
        """``batch`` without the groups that are not trained, whose rows leave the queue.

        A group whose episodes all failed is not trained. The batch has another one: see ``starvation.py``.
        """
        asked = self.turnkey.groups
        spreads = {group: spread([each.score for each in played]) for group, played in found.items() if played}
        kept = most_spread(spreads, asked.keep, asked.keep_by)
        failed = 1 - len(spreads) / len(found)
        metrics.update({"groups/failed": failed, **_metrics([*chain(*found.values())], spreads, kept)})
        self._groups, chosen = len(kept), set(kept)
        left_out = [key for key in batch.keys if split_key(key)[0] not in chosen]
        if not left_out:
            return batch
        self._left_out.update(group for group, _ in {split_key(key)[:2] for key in left_out})
        tq.kv_clear(keys=left_out, partition_id=batch.partition_id)
        return batch.select_keys([key for key in batch.keys if split_key(key)[0] in chosen])


def _metrics(played: list[Outcome], spreads: dict[str, float], kept: list[str]) -> dict[str, float]:
    """Those of ``episode/`` are of the kept groups; here are the means of all episodes as well."""
    total = sum(spreads.values())
    return {
        "groups/kept": len(kept) / len(spreads),
        "groups/kept_spread": sum(spreads[group] for group in kept) / total if total else 0.0,
        "groups/spread/mean": float(np.mean([*spreads.values()])),
        "groups/without_spread": float(np.mean([value == 0 for value in spreads.values()])),
        "groups/score/mean": float(np.mean([each.score for each in played])),
        "groups/solved": float(np.mean([each.solved for each in played])),
    }
