"""Siblings: the candidates for one turn against each other, by their own scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Norm, group_stats, joint_codes, normalize
from verl_turnkey.advantage.methods._step_columns import key_column, step_column
from verl_turnkey.advantage.params import ConfigError, Positive, Ranged
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class SiblingsParams(Ranged):
    norm: Norm = "mean_std"  # divide by the sample std of the siblings, or only subtract their mean
    epsilon: Positive = 1e-6  # added to the std


@register_estimator(
    "siblings",
    params=SiblingsParams,
    needs=("extra.parent", "extra.candidate_score"),
    before=("extra.parent",),
    paper="SLATE, arXiv:2602.23440",
    summary="compares the candidates for one turn, taken from the same state, by their own scores",
)
def siblings(batch: StepBatch, params: SiblingsParams) -> Credit:
    """``A(s) = (r(s) - mean_b) / F_b - penalty(s)``: each candidate for a turn against the others.

    ``r`` is ``extra.candidate_score``; ``b`` are the steps of the group with the same ``extra.parent``, ``F`` their
    sample std plus epsilon (``norm="mean_std"``) or 1. A step without siblings gets 0, and so do equal ones.

    Source: SLATE, arXiv:2602.23440, from its abstract and official repository. The repository computes these
    advantages and trains on none of them; the text is followed.

    Raises:
        ConfigError: a step has no ``extra.parent``, or no finite score.
    """
    parent, ids = key_column(batch, "parent")
    if len(nowhere := np.flatnonzero(parent >= len(ids))):
        raise ConfigError(
            f"extra.parent: row {nowhere[0]} has no key: expected one of the path so far, equal for the candidates for "
            "one turn, as turnkey.rollout.strategy=siblings writes it"
        )
    score = step_column(batch, "siblings", "candidate_score")
    codes, n = joint_codes(batch.group, parent)
    stats = group_stats(score, codes, n)
    compared = normalize(score, codes, stats, params.norm, params.epsilon)
    metrics = {
        "credit/groups": float(n),
        "credit/siblings": float(np.mean(stats.size)) if n else 0.0,
        "credit/share_with_siblings": float(np.mean(stats.size[codes] >= 2)) if len(codes) else 0.0,
    }
    return Credit.of_parts({"sibling_level": compared}, batch.penalty, metrics=metrics, groups={"sibling_level": codes})
