"""verl's group filtering on the played episodes only.

verl compares the rewards of all rows in a group, where the 0 of a failed episode would count as an outcome.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from verl_turnkey.plugins.credit.extra_fields import FIELDS as EXTRA_FIELDS
from verl_turnkey.plugins.credit.extra_fields import pop_extra_fields
from verl_turnkey.plugins.credit.row_turns import split_key
from verl_turnkey.plugins.credit.rows import failure
from verl_turnkey.plugins.verl_api import internals
from verl_turnkey.plugins.verl_api.queue import Partition


def failures(keys: Sequence[str], partition_id: str) -> dict[str, str | None]:
    """Why the episode of each key failed; None if it was played.

    A failed episode is a single row, so only episodes of one row are read.
    """
    rows = Counter(split_key(key)[1] for key in keys)
    single_rows = [key for key in keys if rows[split_key(key)[1]] == 1]
    reasons: dict[str, str | None] = dict.fromkeys(keys)
    if single_rows:
        data = Partition(partition_id).read(single_rows, [*EXTRA_FIELDS, "response_mask"])
        extra_fields, masks = pop_extra_fields(data), data["response_mask"].unbind()
        for key, extra, mask in zip(single_rows, extra_fields, masks, strict=True):
            reasons[key] = failure(extra, bool(mask.any()))
    return reasons


class PlayedOnly:
    """Judges the groups with a failed episode and writes the result to verl's cache; verl judges all other groups.

    Such a group is dropped when its played episodes all have the same value, or when none was played.
    """

    def __init__(self, buffer: Any) -> None:
        self.dead: dict[str, set[str]] = {}
        """group -> reasons, of groups without a played episode; dropping a group removes its entry"""
        self._buffer = buffer
        self._judge = buffer._dapo_filtered_keys
        buffer._dapo_filtered_keys = self._filtered_keys

    def _filtered_keys(self, partition_id: str) -> Any:
        if partition_id != "val" and self._buffer.filter_groups_metric is not None:
            self._judge_broken(partition_id)
        return self._judge(partition_id)

    def _judge_broken(self, partition_id: str) -> None:
        judged = self._buffer._dapo_classification_cache[partition_id]
        newly_finished = self._buffer.finished_keys[partition_id] - judged.keys()
        groups: dict[str, list[str]] = {uid: [] for uid in newly_finished}
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

    def _values(self, keys: list[str], partition_id: str) -> list[float | None]:
        """The value of each row that verl would compare; None if there is none."""
        if not keys:
            return []
        metric = self._buffer.filter_groups_metric
        if metric == internals.reward_metric():
            data = Partition(partition_id).read(keys, ["rm_scores"])
            return [float(scores.sum()) for scores in data["rm_scores"].unbind()]
        fields = [*EXTRA_FIELDS, "response_mask"]  # which every row has: a read that finds no column fails
        data = Partition(partition_id).read(keys, fields)
        infos = [extra.get("reward_extra_info") or {} for extra in pop_extra_fields(data)]
        return [float(info[metric]) if metric in info else None for info in infos]
