"""Unlikeliness reward: among the rollouts of a group, likely ones earn less."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, Ints, equal, mean, run_sums
from verl_turnkey.advantage.methods._step_columns import step_column
from verl_turnkey.advantage.modifying import Estimate, register_modifier
from verl_turnkey.advantage.params import Ranged, Unit


@dataclass(frozen=True)
class UnlikelinessParams(Ranged):
    """Parameters of ``unlikeliness``, the method and the modifier."""

    beta: Unit = 0.25  # share of the reward that the likeliest rollout of a large group loses


@register_modifier(
    "unlikeliness",
    params=UnlikelinessParams,
    needs=("tokens", "extra.log_prob"),
    paper="Rewarding the Unlikely (2025)",
    summary="among the rollouts of a group, those that the policy finds likely earn less",
)
def unlikeliness(batch: StepBatch, params: UnlikelinessParams, estimate: Estimate) -> Credit:
    """Rewards and scores before the estimator, by the likeliness of the whole trajectory.

    ::

        l(i) = sum of extra.log_prob / sum of tokens, over the trajectory
        R(i) = R(i) (1 - beta rank(i) / G)               rank 0: the least likely of the G trajectories of the group

    Equally likely trajectories share the mean of their ranks (our reading: no order is preferred). Every reward of the
    trajectory is multiplied, so methods with step rewards see the same change as its score. Negative outcomes shrink
    with the rest.

    Source: the authors' code, for outcomes of 0 and 1.
    """
    total = run_sums(step_column(batch, "unlikeliness", "log_prob"), batch.runs)
    likely = total / np.maximum(run_sums(batch.tokens.astype(np.float64), batch.runs), 1.0)
    group = batch.group[batch.first_rows]
    factor = 1 - params.beta * _ranks(likely, group) / np.bincount(group, minlength=batch.n_groups)[group]
    rows = factor[batch.trajectory]
    score = {"score": batch.score * rows} if "score" in batch.given else {}
    credit = estimate(batch.replaced(reward=batch.reward * rows, outcome=batch.outcome * rows, **score))
    metrics = {"factor/mean": mean(factor), "log_prob/mean": mean(likely)}
    return replace(credit, metrics=metrics, levels={"reward_factor": rows})


def _ranks(values: Floats, group: Ints) -> Floats:
    """Rank of each value in its group, 0 for the smallest; equal ones share the mean of theirs."""
    if not len(values):
        return values
    order = np.lexsort((values, group))
    ordered, groups = values[order], group[order]
    first = np.ones(len(order), dtype=bool)
    first[1:] = groups[1:] != groups[:-1]
    begins = np.flatnonzero(first)
    place = np.arange(len(order)) - np.repeat(begins, np.diff(begins, append=len(order)))
    first[1:] |= ~equal(ordered[1:], ordered[:-1])
    ties = np.flatnonzero(first)
    size = np.diff(ties, append=len(order))
    ranks = np.empty(len(order))
    ranks[order] = np.repeat(place[ties] + (size - 1) / 2, size)
    return ranks
