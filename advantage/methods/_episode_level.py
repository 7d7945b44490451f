"""The episode level that the group-based estimators share: one score per trajectory, compared inside its group."""

from __future__ import annotations

from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.group_ops import Floats, Norm, group_stats, normalize

Scope = Literal["trajectories", "steps", "outcomes"]
Singleton = Literal["zero", "score"]


def penalties(batch: StepBatch, scope: Scope) -> tuple[Floats, Floats]:
    """What each step is penalised inside its returns and score, and what after all statistics, off its advantage.

    -> two of (S,). The released codes have the penalty inside, where it moves the mean and the std of everybody it is
    compared with: in a group of equal outcomes the spread is then the penalties', and nearly all steps that did nothing
    wrong can get more than a standard deviation. ``scope="outcomes"`` compares what was earned, at every level, and
    takes the penalty from the penalised step alone, in units of advantage.
    """
    nothing = np.zeros(len(batch))
    return (nothing, batch.penalty) if scope == "outcomes" else (batch.penalty, nothing)


def episode_level(batch: StepBatch, *, norm: Norm, scope: Scope, singleton: Singleton, epsilon: float) -> Floats:
    """``A_E(i) = (R_i - mean_g) / F_g`` for every step row -> (S,); ``F`` is the sample std plus epsilon, or 1.

    With ``scope="outcomes"`` a row's own value is its score, and each trajectory counts once; its penalty is the
    caller's (:func:`penalties`). With the others it is ``score - penalty``. ``"trajectories"``: each trajectory counts
    once, by the value of its earliest step (verl-agent's ``compute_mean_std_cross_steps=False``), so a penalty moves
    the mean and the std there, and only its own row later. ``"steps"``: every row enters the statistics of its group,
    so a trajectory counts as often as it has steps (verl-agent's trainer).

    A group of one value gives 0, or the row's own value with ``singleton="score"``. A group whose counted values are
    all equal gives 0 (with ``norm="mean"`` minus the penalty, for a penalised row that is not counted).
    """
    own = batch.score - penalties(batch, scope)[0]
    counted = np.arange(len(batch)) if scope == "steps" else batch.first_rows
    stats = group_stats(own[counted], batch.group[counted], batch.n_groups)
    advantage = normalize(own, batch.group, stats, norm, epsilon)
    alone = stats.size[batch.group] == 1
    return np.where(alone, own if singleton == "score" else 0.0, advantage)
