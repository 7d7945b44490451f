"""iStar: the outcome's advantage plus that of each step's score, from an implicit or any other process reward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, Ints, against_others, group_stats, normalize
from verl_turnkey.advantage.methods._episode_level import EPSILON, two_levels
from verl_turnkey.advantage.methods._step_columns import step_column
from verl_turnkey.advantage.params import NotNegative, Ranged
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class StepEpisodeParams(Ranged):
    """Parameters of ``step_episode``; the defaults are the paper's."""

    alpha: NotNegative = 1.0  # weight of the step level
    estimator: Literal["rloo", "grpo", "reinforce_pp"] = "rloo"
    """of both levels: against the mean of the others; against the group's mean, divided by the group's std; or by the
    batch's std (REINFORCE++ with the group as baseline)"""
    baseline: Literal["all_steps", "one_per_trajectory"] = "all_steps"
    """the step scores of a group that its statistics are over: all, or each trajectory's first (released code)"""


@register_estimator(
    "step_episode",
    params=StepEpisodeParams,
    needs=("extra.turn_score",),
    paper="iStar / OPRL, arXiv:2509.19199",
    summary="compares each trajectory's outcome with its group, and each step's score with the group's step scores",
)
def step_episode(batch: StepBatch, params: StepEpisodeParams) -> Credit:
    """Episode-level plus step-level advantage.

    ::

        A_E(i)   = G / (G - 1) (R_i - mean_g R)               episode level, G trajectories in the group
        A_S(i,k) = N / (N - 1) (q(i,k) - mean_g q)            step level, N step scores in the group
        A(i,k)   = A_E(i) + alpha A_S(i,k) - penalty(i,k)

    ``q`` is ``extra["turn_score"]``. The factors are those of ``estimator="rloo"``; ``"grpo"`` divides by the group's
    sample std plus 1e-6 instead, ``"reinforce_pp"`` by the sample std of all centred values of the batch. A group of
    one, and a constant group, give 0 at their level.

    Source: arXiv:2509.19199; released code Qwen-Character/CharacterRL-iStar, whose step baseline reads one step of
    each trajectory (``baseline="one_per_trajectory"``; which one depends on the order of its rows, ours is the
    earliest). The paper's q is an implicit process reward, 0.05 times the log-ratio of a model trained online by
    trajectory-wise preference; any scorer will do here. Our reading: ``reinforce_pp``, of which only the name was read,
    divides without centring again, so that a constant group keeps 0; the penalty.
    """
    score = step_column(batch, "step_episode", "turn_score")
    first = batch.first_rows
    everything = np.arange(len(batch))
    episode = _level(batch, batch.score, first, params.estimator)
    step = _level(batch, score, everything if params.baseline == "all_steps" else first, params.estimator)
    return two_levels(batch, episode, params.alpha * step, batch.group)


def _level(batch: StepBatch, values: Floats, counted: Ints, estimator: str) -> Floats:
    """``values`` (S,) against the values of the rows ``counted`` of their group."""
    stats = group_stats(values[counted], batch.group[counted], batch.n_groups)
    if estimator == "rloo":
        return against_others(values, batch.group, stats)
    if estimator == "grpo":
        return normalize(values, batch.group, stats, "mean_std", EPSILON)
    centred = np.where(stats.size[batch.group] > 1, normalize(values, batch.group, stats, "mean", EPSILON), 0.0)
    spread = group_stats(centred[counted], np.zeros(len(counted), np.int64), 1).std[0]
    return centred / (spread + EPSILON) if spread > 0 else np.zeros(len(batch))
