"""MaxRL: the outcome against the group's mean, divided by that mean, so that rare successes weigh more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import equal, normalize
from verl_turnkey.advantage.methods._episode_level import Singleton, of_singletons, outcome_credit, outcomes
from verl_turnkey.advantage.params import NotNegative, Ranged
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class MaxrlParams(Ranged):
    epsilon: NotNegative = 0.0  # added to the mean; the authors' code: 1.0e-6
    singleton: Singleton = "zero"  # advantage in a group of one: 0, or its raw score (SkyRL)


@register_estimator(
    "maxrl",
    params=MaxrlParams,
    bounded_outcomes=True,
    paper="MaxRL, arXiv:2602.02710",
    summary="divides each outcome's distance from the group's mean by that mean: rare successes weigh more",
)
def maxrl(batch: StepBatch, params: MaxrlParams) -> Credit:
    """``A(i, t) = (R_i - mean_g) / (mean_g + epsilon) - penalty(i, t)``; 0 in a group whose mean is 0.

    With outcomes 0 and 1, k of n solved: a success gets (n - k) / k and a failure -1. The expected update is the
    gradient of log-likelihood truncated at order n, where GRPO's and RLOO's are those of the success rate. Penalties
    enter no statistic. Outcomes are successes, or at least no less than 0: among outcomes of both signs the mean is not
    a scale, however large the others make it. A group that holds a negative outcome gets 0 (our reading).

    Source: arXiv:2602.02710. The released codes add 1e-6 to the mean (authors, SkyRL) or nothing (prime-rl). They
    differ where the mean is not a scale: prime-rl gives 0 in a group of one and where the mean is 0 or less, which is
    taken here; the authors' code divides the score of a group of one by 1e-6, and both others flip all signs under a
    negative mean.
    """
    outcome, stats = outcomes(batch, "outcomes")
    lowest = np.zeros(batch.n_groups)
    np.minimum.at(lowest, batch.group, outcome)
    negative = ~equal(lowest, 0.0)
    solved = ~negative & ~equal(stats.mean, 0.0)
    mean = stats.mean[batch.group]
    centred = normalize(outcome, batch.group, stats, "mean", 0.0)
    advantage = np.divide(centred, mean + params.epsilon, out=np.zeros(len(batch)), where=solved[batch.group])
    advantage = of_singletons(outcome, batch, stats, params.singleton, advantage)
    return outcome_credit(
        batch,
        advantage,
        batch.penalty,
        share_groups_without_success=float(np.mean(~negative & ~solved)) if batch.n_groups else 0.0,
        share_groups_with_negative_outcomes=float(np.mean(negative)) if batch.n_groups else 0.0,
    )
