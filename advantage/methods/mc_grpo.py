"""MC-GRPO: outcomes against the group's median, divided by the median absolute deviation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, Ints, equal, mean
from verl_turnkey.advantage.methods._episode_level import outcome_credit, outcomes
from verl_turnkey.advantage.params import NotNegative, Positive, Ranged
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class McGrpoParams(Ranged):
    floor: NotNegative = 0.6745
    """the deviation counts as at least so many sample stds of the group; the default is the ratio of a normal
    distribution, and 0 the paper's plain formula"""
    epsilon: Positive = 1e-3  # added to the deviation


@register_estimator(
    "mc_grpo",
    params=McGrpoParams,
    paper="MC-GRPO, arXiv:2601.22582",
    summary="compares outcomes with the group's median, in units of the median deviation; for small groups",
)
def mc_grpo(batch: StepBatch, params: McGrpoParams) -> Credit:
    """Median-centred credit, each trajectory once.

    ::

        b = median of the group's R         MAD = median |R - b|         d = max(MAD, floor * std)
        A(i)   = (R_i - b) / (d + epsilon) * n / (number of R other than b)
        A(i,t) = A(i) - penalty(i,t)

    With an odd n at least one trajectory has R = b. The paper drops the median sample from the update; here it has
    advantage 0, which is the same but for what a loss divides by. A constant group and a group of one get 0.

    Source: arXiv:2601.22582 and its code, which have no ``floor``. With outcomes of 0 and 1 the MAD is 0 whenever more
    than half agree, and the plain formula divides by epsilon alone: 0, 0, 0, 0, 1 would give the last 5000. The floor
    is our reading.
    """
    outcome, stats = outcomes(batch, "outcomes")
    values, group = outcome[batch.first_rows], batch.group[batch.first_rows]
    median = _medians(values, group, batch.n_groups)
    off = ~equal(values, median[group])
    deviation = _medians(np.where(off, np.abs(values - median[group]), 0.0), group, batch.n_groups)
    scale = np.maximum(deviation, params.floor * stats.std) + params.epsilon
    others = np.maximum(np.bincount(group, weights=off, minlength=batch.n_groups), 1.0)
    constant = stats.std == 0
    factor = np.where(constant, 0.0, np.maximum(stats.size, 1) / others / scale)
    centred = np.where(equal(outcome, median[batch.group]), 0.0, outcome - median[batch.group])
    advantage = centred * factor[batch.group]
    share = mean(equal(deviation, 0.0) & ~constant)
    return outcome_credit(batch, advantage, batch.penalty, share_groups_without_mad=share)


def _medians(values: Floats, codes: Ints, n: int) -> Floats:
    """Median of the values of each group, all of which have some -> (n,)."""
    ordered = values[np.lexsort((values, codes))]
    size = np.bincount(codes, minlength=n)
    starts = np.cumsum(size) - size
    return (ordered[starts + (size - 1) // 2] + ordered[starts + size // 2]) / 2 if n else np.zeros(0)
