"""REINFORCE++ with a group baseline, per trajectory, as a baseline of the measurements."""

from __future__ import annotations

import numpy as np

from verl_turnkey.advantage import Credit, StepBatch

REINFORCE = "reinforce++ baseline"
"""its name among the methods"""


def reinforce(batch: StepBatch) -> Credit:
    """REINFORCE++ with a group baseline (arXiv:2501.03262), per trajectory: its outcome minus its group's mean,
    normalised over all tokens, as verl does it; but verl's mean of step rows is over rows, not over trajectories.
    """
    first = batch.first_rows
    mean = np.bincount(batch.group[first], batch.score[first]) / np.bincount(batch.group[first])
    centred = batch.score - mean[batch.group]
    tokens = batch.tokens.sum()
    middle = (batch.tokens * centred).sum() / tokens
    variance = (batch.tokens * (centred - middle) ** 2).sum() / (tokens - 1)
    return Credit((centred - middle) / np.sqrt(variance + 1e-8) - batch.penalty)
