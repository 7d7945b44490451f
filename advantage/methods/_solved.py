"""Trajectories that solved their task, and credit among them alone."""

from __future__ import annotations

import numpy as np

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.group_ops import Bools, Floats, group_stats, normalize


def solved_trajectories(batch: StepBatch) -> Bools:
    """Whether each trajectory (n_trajectories,) has a step with ``success``."""
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
