"""NGRPO: a virtual best rollout in every group, so that a group that failed as a whole has credit too."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import ROUNDING, equal, group_stats, mean, normalize
from verl_turnkey.advantage.methods._episode_level import outcome_credit, outcomes, refuse_outcomes
from verl_turnkey.advantage.params import Finite, Positive, Ranged
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class NgrpoParams(Ranged):
    r_max: Finite = 1.0  # outcome of the virtual rollout: the largest that the task can have
    epsilon: Positive = 1e-6  # added to the std


@register_estimator(
    "ngrpo",
    params=NgrpoParams,
    bounded_outcomes=True,
    paper="NGRPO (2025)",
    summary="GRPO with a virtual best rollout in every group: groups that fail as a whole teach something too",
)
def ngrpo(batch: StepBatch, params: NgrpoParams) -> Credit:
    """``A(i, t) = (R_i - m) / (s + epsilon) - penalty(i, t)``, m and s over the group's outcomes and ``r_max``.

    m is the mean and s the sample std of n + 1 values. A group of n equal outcomes below ``r_max`` gets
    -1 / sqrt(n + 1), one of ``r_max`` alone 0, and one rollout alone -1 / sqrt(2).

    Source: the authors' code. The paper also clips asymmetrically and drops groups that are all correct; both are
    settings of verl.
    """
    outcome, _ = outcomes(batch, "outcomes")
    bad = outcome > params.r_max + ROUNDING * max(1.0, abs(params.r_max))
    expected = f"ngrpo: expected outcomes of at most r_max={params.r_max:g}"
    refuse_outcomes(batch, outcome, bad, expected, "set r_max to the largest outcome possible")
    values = np.concatenate([outcome[batch.first_rows], np.full(batch.n_groups, params.r_max)])
    groups = np.concatenate([batch.group[batch.first_rows], np.arange(batch.n_groups)])
    stats = group_stats(values, groups, batch.n_groups)
    advantage = normalize(outcome, batch.group, stats, "mean_std", params.epsilon)
    best = np.full(batch.n_groups, -np.inf)
    np.maximum.at(best, batch.group, outcome)
    failed = ~equal(best, params.r_max)
    share = mean(failed)
    return outcome_credit(batch, advantage, batch.penalty, share_groups_without_r_max=share)
