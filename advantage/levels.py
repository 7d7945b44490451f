"""The episode level that the group-based estimators share: one score per trajectory, compared inside its group."""

from __future__ import annotations

from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.segments import Floats, Norm, group_stats, normalise

Scope = Literal["trajectories", "steps"]
Singleton = Literal["zero", "score"]


def episode_level(batch: StepBatch, *, norm: Norm, scope: Scope, singleton: Singleton, epsilon: float) -> Floats:
    """``A_E(i) = (R_i - mean_g) / F_g`` for every step row -> (S,); ``F`` is the sample std plus epsilon, or 1.

    A row's own value is its ``score - penalty``. With ``scope="steps"`` every row enters the statistics of its group,
    so a trajectory counts as often as it has steps (verl-agent's trainer). With ``scope="trajectories"`` each
    trajectory counts once, by the value of its earliest step (verl-agent's ``compute_mean_std_cross_steps=False``): a
    penalty on a later step moves that row away from the mean, but not the mean.

    A group of one value gives 0, or the row's own value with ``singleton="score"``. A group whose counted values are
    all equal gives 0 (with ``norm="mean"`` minus the penalty, for a penalised row that is not counted).
    """
    own = batch.score - batch.penalty
    counted = batch.first_rows if scope == "trajectories" else np.arange(len(batch))
    stats = group_stats(own[counted], batch.group[counted], batch.n_groups)
    advantage = normalise(own, batch.group, stats, norm, epsilon)
    alone = stats.size[batch.group] == 1
    return np.where(alone, own if singleton == "score" else 0.0, advantage)
