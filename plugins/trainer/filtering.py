"""verl's group filtering, judged by the episodes that were played.

verl compares the reward of every row in a group: the zero of an environment that broke down would be a loss among wins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import FILTER_GROUPS_REWARD_METRIC

from verl_turnkey.plugins.credit.row_turns import split_key
from verl_turnkey.plugins.credit.rows import failure


def failures(keys: Sequence[str], partition_id: str) -> dict[str, str | None]:
    """By key, why this row is no part of an episode that was played; None: it is.

    A failed episode is a single row, so only rows that are alone in their episode are looked at.
    """
    rows = Counter(split_key(key)[1] for key in keys)
    alone = [key for key in keys if rows[split_key(key)[1]] == 1]
    found: dict[str, str | None] = dict.fromkeys(keys)
    if alone:
        fields = ["extra_fields", "response_mask"]
        data = tq.kv_batch_get(keys=alone, partition_id=partition_id, select_fields=fields)
        extra_fields, masks = data.pop("extra_fields").tolist(), data["response_mask"].unbind()
        for key, extra, mask in zip(alone, extra_fields, masks, strict=True):
            found[key] = failure(extra, bool(mask.any()))
    return found


class PlayedOnly:
    """Judges the groups that hold a failed episode, in verl's own memory of judged groups; all others verl judges.

    Such a group is thrown away when what was played in it is all alike, also when that is nothing.
    """

    def __init__(self, buffer: Any) -> None:
        self.dead: dict[str, set[str]] = {}
        """why, for each group in which nothing was played; whoever throws it away takes it out"""
        self._buffer = buffer
        self._judge = buffer._dapo_filtered_keys
        buffer._dapo_filtered_keys = self._filtered_keys

    def _filtered_keys(self, partition_id: str) -> Any:
        if partition_id != "val" and self._buffer.filter_groups_metric is not None:
            self._judge_broken(partition_id)
        return self._judge(partition_id)

    def _judge_broken(self, partition_id: str) -> None:
        judged = self._buffer._dapo_classification_cache[partition_id]
        new = self._buffer.finished_keys[partition_id] - judged.keys()
        groups: dict[str, list[str]] = {uid: [] for uid in new}
        for key in self._buffer.partitions[partition_id]:
            if (uid := split_key(key)[0]) in groups:
                groups[uid].append(key)
        reasons = failures([key for keys in groups.values() for key in keys], partition_id)
        broken = {uid: keys for uid, keys in groups.items() if any(reasons[key] for key in keys)}
        played = [key for keys in broken.values() for key in keys if not reasons[key]]
        value = dict(zip(played, self._values(played, partition_id), strict=True))
        for uid, keys in broken.items():
            values = [value[key] for key in keys if key in value]
            if not values:
                self.dead[uid] = {str(reasons[key]) for key in keys}
            if None not in values:  # else verl names the metric that is missing
                judged[uid] = None if len(set(values)) > 1 else next(iter(values), 0.0)

    def _values(self, keys: Sequence[str], partition_id: str) -> list[float | None]:
        """What verl would compare, of each row."""
        if not keys:
            return []
        metric = self._buffer.filter_groups_metric
        if metric == FILTER_GROUPS_REWARD_METRIC:
            data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["rm_scores"])
            return [float(scores.sum()) for scores in data["rm_scores"].unbind()]
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["extra_fields"])
        infos = [extra.get("reward_extra_info") or {} for extra in data.pop("extra_fields").tolist()]
        return [float(info[metric]) if metric in info else None for info in infos]
