"""GRSD: in groups of both outcomes, turns that a teacher with the group's lessons agrees with weigh more."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import group_stats, mean
from verl_turnkey.advantage.methods._episode_level import solved_trajectories
from verl_turnkey.advantage.methods._step_columns import step_column
from verl_turnkey.advantage.modifying import Estimate, register_modifier
from verl_turnkey.advantage.params import Finite, NotNegative, Ranged

_EPSILON = 1e-6
_LEAST, _MAX_GAP = 0.1, 20.0


@dataclass(frozen=True)
class GrsdParams(Ranged):
    """Parameters of ``grsd``; the defaults are the released launchers'."""

    lam: NotNegative = 0.5  # how much the bounded term changes the credit
    eta: NotNegative = 0.0  # terms of at most this size count as 0
    bound: NotNegative = 0.2  # of the term; 3 in the released code
    success: Finite | None = None
    """a return above it is a success; null: the column success, or, without one, a return above 0"""


@register_modifier(
    "grsd",
    params=GrsdParams,
    needs=("extra.teacher_gap_mean",),
    paper="GRSD, arXiv:2607.28076",
    summary="scales the credit of each turn by the teacher's mean gap against those of its group, of both outcomes",
)
def grsd(batch: StepBatch, params: GrsdParams, estimate: Estimate) -> Credit:
    """Over the turns of a group that have a text::

        e  = exp(sign(A) d) - 1                        d: extra.teacher_gap_mean, clipped to +-20
        n  = e / (mean |e| + 1e-6)                     0 where |n| <= eta
        A' = A max(0.1, 1 + lam clip(n, -bound, bound))

    A turn without a text, and a group without a success or without a failure, keeps its credit.

    Source: the authors' code (BinbZheng1/GRSD at 393213a), whose numbers this has. Its bound is 3 in the code and 0.2
    in the launchers: there nearly every turn is at a bound, and the sign of ``sign(A) d`` decides. The text, which
    the policy writes about the finished episodes of the group, comes from ``turnkey.teacher.source``.
    """
    credit = estimate(batch)
    gap = step_column(batch, "grsd", "teacher_gap_mean", gaps=True)
    has_gap = ~np.isnan(gap)
    e = np.expm1(np.clip(np.sign(credit.advantage) * np.where(has_gap, gap, 0.0), -_MAX_GAP, _MAX_GAP))
    size = group_stats(np.abs(e), batch.group, batch.n_groups, weights=has_gap.astype(np.int64)).mean
    term = e / (size[batch.group] + _EPSILON)
    term = np.where(np.abs(term) > params.eta, term, 0.0)
    solved = solved_trajectories(batch, params.success).astype(np.float64)
    won = group_stats(solved, batch.group[batch.first_rows], batch.n_groups).mean
    changes = has_gap & ((won > 0) & (won < 1))[batch.group]
    bounded = np.clip(term, -params.bound, params.bound)
    factor = np.where(changes, np.maximum(_LEAST, 1 + params.lam * bounded), 1.0)
    at_bound = np.abs(term[changes]) >= params.bound
    metrics = {"share_at_bound": mean(at_bound), "share_of_turns": mean(changes)}
    return replace(credit, advantage=credit.advantage * factor, metrics=metrics, levels={"factor": factor})
