"""Trajectories that solved their task, and credit among them alone."""

from __future__ import annotations

import numpy as np

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.group_ops import Bools, Floats, equal, group_stats, normalize


def solved_trajectories(batch: StepBatch, above: float | None = None) -> Bools:
    """Whether each trajectory (n_trajectories,) has a step with ``success``.

    With ``above``, and by ``above=0`` where the batch has no column ``success``: whether its ``env_return`` is larger.
    """
    if above is not None or "success" not in batch.given:
        own, least = batch.env_return[batch.first_rows], above or 0.0
        return (own > least) & ~equal(own, least)
    return np.bincount(batch.trajectory, weights=batch.success, minlength=batch.n_trajectories) > 0


def among_solved(batch: StepBatch, values: Floats, counted: Bools, epsilon: float) -> Floats:
    """``(value - mean) / (std + epsilon)`` over the ``counted`` trajectories of each group -> (n_trajectories,).

    0 for the others, and in a group that counts fewer than two, or whose values are equal.
    """
    rows = np.flatnonzero(counted)
    group = batch.group[batch.first_rows][rows]
    result = np.zeros(batch.n_trajectories)
    result[rows] = normalize(values[rows], group, group_stats(values[rows], group, batch.n_groups), "mean_std", epsilon)
    return result
