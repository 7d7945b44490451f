"""Outcomes of the episodes of a batch by group, read from the rows in the queue."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_turnkey.plugins.credit.extra_fields import FIELDS as EXTRA_FIELDS
from verl_turnkey.plugins.credit.extra_fields import pop_extra_fields
from verl_turnkey.plugins.credit.row_turns import record_of, split_key
from verl_turnkey.plugins.credit.rows import Rows
from verl_turnkey.plugins.notices import warn_once
from verl_turnkey.plugins.trainer.filtering import failures
from verl_turnkey.plugins.verl_api.queue import KVBatchMeta, partition_of


@dataclass(frozen=True)
class Outcome:
    """A played episode."""

    episode: str
    """``{uid}_{session}``"""
    score: float
    """sum of verl's rewards on its last row: the rewards of the episode"""
    solved: float
    """``acc`` of verl's ``reward_extra_info``, else the flag of the record, else the score clipped to [0, 1]"""


def outcomes(batch: KVBatchMeta) -> dict[str, list[Outcome]]:
    """The played episodes of each group; a group whose episodes all failed has none."""
    reasons = failures(batch.keys, partition_of(batch).name)
    by_group: dict[str, list[Outcome]] = {split_key(key)[0]: [] for key in batch.keys}
    last = last_rows([key for key in batch.keys if not reasons[key]])
    if last:
        data = partition_of(batch).read(last, ["rm_scores", *EXTRA_FIELDS])
        extra_fields = pop_extra_fields(data)
        for key, scores, extra in zip(last, data["rm_scores"].unbind(), extra_fields, strict=True):
            group, episode, _ = split_key(key)
            by_group[group].append(_outcome(episode, float(scores.sum()), extra))
    return by_group


def _outcome(episode: str, score: float, extra: Mapping[str, Any]) -> Outcome:
    acc = (extra.get("reward_extra_info") or {}).get("acc")
    if acc is None and (steps := (record_of(extra) or {}).get("steps")):
        acc = any(step["success"] for step in steps)
    return Outcome(episode, score, min(max(score, 0.0), 1.0) if acc is None else float(acc))


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


def last_rows(keys: Sequence[str]) -> list[str]:
    """The last row of each episode, sorted by episode."""
    last: dict[str, tuple[int, str]] = {}
    for key in keys:
        _, episode, index = split_key(key)
        last[episode] = max(last.get(episode, (-1, "")), (index, key))
    return [last[episode][1] for episode in sorted(last)]
