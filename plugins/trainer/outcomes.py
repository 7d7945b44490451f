"""Outcomes of the episodes of a batch by group, and which groups differ most in them.

verl's group filtering compares the rewards of all rows in a group, where the 0 of a failed episode would count as an
outcome; here it judges the played episodes only.

:func:`most_spread` is the filter of StarPO-S: RAGEN, arXiv:2504.20073: "train on the most uncertain prompts". Its first
code keeps a share of the groups, its later code the fewest groups that hold a share of all spread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_turnkey.plugins.config.training import share_of
from verl_turnkey.plugins.credit.rows import EXTRA_FIELDS, Rows, failure, pop_extra_fields, record_of, split_key
from verl_turnkey.plugins.notices import warn_once
from verl_turnkey.plugins.verl_api import internals
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, Partition, partition_of


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


TOLERANCE = 0.01
"""how far the kept groups may fall short of their share of all spread, as in RAGEN's code"""


def spread(scores: Sequence[float]) -> float:
    """Sample standard deviation; 0 with fewer than two episodes, and exactly 0 if all are equal."""
    if len(scores) < 2 or min(scores) == max(scores):
        return 0.0
    return float(np.std(scores, ddof=1))


def most_spread(spreads: Mapping[str, float], share: float, by: str) -> list[str]:
    """The groups to train, at least one, in descending order of spread; ties by name.

    Args:
        spreads: of each group.
        share: in (0, 1]; with 1 all groups are kept.
        by: ``groups``: that share of the number of groups, rounded down; ``spread``: the fewest groups whose spreads
            add up to that share of the sum of all, less :data:`TOLERANCE`.
    """
    names = sorted(spreads, key=lambda name: (-spreads[name], name))
    if share >= 1:
        return names
    if by == "groups":
        number = share_of(len(names), share)
    else:
        so_far = np.cumsum([spreads[name] for name in names])
        number = int(np.searchsorted(so_far, share * so_far[-1] - TOLERANCE)) + 1
    return names[: min(max(1, number), len(names))]


@dataclass(frozen=True)
class EpisodeScore:
    """A played episode."""

    episode: str
    """``{uid}_{session}``"""
    score: float
    """sum of verl's rewards on its last row: the rewards of the episode"""
    solved: float
    """``acc`` of verl's ``reward_extra_info``, else the flag of the record, else the score clipped to [0, 1]"""


def outcomes(batch: KVBatchMeta) -> dict[str, list[EpisodeScore]]:
    """The played episodes of each group; a group whose episodes all failed has none."""
    reasons = failures(batch.keys, partition_of(batch).name)
    by_group: dict[str, list[EpisodeScore]] = {split_key(key)[0]: [] for key in batch.keys}
    played = sorted((*split_key(key)[1:], key) for key in batch.keys if not reasons[key])
    if last := list({episode: key for episode, _, key in played}.values()):  # the last row of each
        data = partition_of(batch).read(last, ["rm_scores", *EXTRA_FIELDS])
        extra_fields = pop_extra_fields(data)
        for key, scores, extra in zip(last, data["rm_scores"].unbind(), extra_fields, strict=True):
            group, episode, _ = split_key(key)
            by_group[group].append(_outcome(episode, float(scores.sum()), extra))
    return by_group


def _outcome(episode: str, score: float, extra: Mapping[str, Any]) -> EpisodeScore:
    acc = (extra.get("reward_extra_info") or {}).get("acc")
    if acc is None and (steps := (record_of(extra) or {}).get("steps")):
        acc = any(step["success"] for step in steps)
    return EpisodeScore(episode, score, min(max(score, 0.0), 1.0) if acc is None else float(acc))


def warn_of_other_outcomes(rows: Rows, scores: torch.Tensor) -> None:
    """Warn once if an agent loop's records and verl's outcome disagree about an episode.

    ``scores``: verl's rewards per token, jagged; the last row of an episode has those of the episode.
    """
    steps = rows.steps
    recorded = np.zeros(steps.trajectory.max(initial=-1) + 1)
    np.add.at(recorded, steps.trajectory, rows.reward_before_kl)
    last = np.zeros(len(recorded), dtype=np.int64)
    np.maximum.at(last, steps.trajectory, rows.row)
    outcome = scores.double().sum(dim=1).numpy()[last]
    if (differs := np.abs(recorded - outcome) > 1e-3 * (1 + np.abs(outcome))).any():
        first = int(differs.argmax())
        warn_once(
            f"the rewards in the records of {int(differs.sum())} of {len(recorded)} episodes do not add up to verl's "
            f"outcome (the first: {recorded[first]:g} and {outcome[first]:g}). Methods learn from the records, "
            "validation and verl's metrics show the outcome: set reward_score of the output to the sum of its rewards"
        )


def of_groups(batch: KVBatchMeta, groups: Iterable[str], fields: Sequence[str]) -> dict[str, list[Any]]:
    """Those of ``fields`` that exist, with an entry per group of ``groups``, from one of its rows."""
    row_of = {split_key(key)[0]: key for key in batch.keys}
    data = partition_of(batch).read([row_of[group] for group in groups], fields)
    return {name: list(data[name]) for name in fields if name in data}
