"""A-GRAE: hard and easy tasks weigh by how good the policy is by now, and positive credit is damped while it is bad."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import ROUNDING, equal, mean
from verl_turnkey.advantage.methods._episode_level import outcomes, refuse_outcomes
from verl_turnkey.advantage.modifying import Estimate, register_modifier
from verl_turnkey.advantage.params import PositiveUnit, Ranged


@dataclass(frozen=True)
class AGraeParams(Ranged):
    """Parameters of ``a_grae``, the estimator and the modifier."""

    alpha: PositiveUnit = 1.0
    """positive credit is damped while the batch's mean outcome is below it; 1 for mathematics, else 0.5 (paper)"""


@register_modifier(
    "a_grae",
    params=AGraeParams,
    bounded_outcomes=True,
    paper="A-GRAE, arXiv:2602.05548",
    summary="weighs easy tasks first and hard ones later; damps positive credit while little is solved",
)
def a_grae(batch: StepBatch, params: AGraeParams, estimate: Estimate) -> Credit:
    """Asymmetric group-relative credit, with w the mean outcome of the batch and p that of the group of n.

    ::

        A' = w/2 A / sqrt(p) + (1 - w)/2 A / sqrt(1 - p)        A' = A where p is 0 or 1
        A' = A' min(1, w / alpha)                               where A' > 0

    Outcomes must lie in [0, 1]: p is a success rate. Each trajectory counts once in w and p. Under the roots p is kept
    within 1/n and 1 - 1/n, as it is where outcomes are 0 or 1: else outcomes that are equal up to noise would have a
    factor without bound.

    Source: arXiv:2602.05548, the paper's equations. The released code divides the second term by 1 - sqrt(p), takes w
    over the means of groups, and applies all of it in the first training step alone.
    """
    credit = estimate(batch)
    outcome, stats = outcomes(batch, "outcomes")
    bad = (outcome < -ROUNDING) | (outcome > 1 + ROUNDING)
    expected = "a_grae: expected outcomes in [0, 1], which are read as success rates"
    refuse_outcomes(batch, outcome, bad, expected, "change the environment's rewards or turnkey.rewards")
    w = mean(outcome[batch.first_rows])
    p = stats.mean[batch.group]
    mixed = ~(equal(p, 0.0) | equal(p, 1.0))
    least = 1 / np.maximum(stats.size[batch.group], 2)
    rate = np.where(mixed, np.clip(p, least, 1 - least), 0.5)
    scale = np.where(mixed, w / 2 / np.sqrt(rate) + (1 - w) / 2 / np.sqrt(1 - rate), 1.0)
    advantage = credit.advantage * scale
    damping = min(1.0, max(w, 0.0) / params.alpha)
    advantage = np.where(advantage > 0, advantage * damping, advantage)
    metrics = {"mean_outcome": w, "damping": damping}
    return replace(credit, advantage=advantage, metrics=metrics, levels={"group_factor": scale})
