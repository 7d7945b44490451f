"""GRPO on step rows: every step carries the advantage of its trajectory."""

from __future__ import annotations

from dataclasses import dataclass

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Norm
from verl_turnkey.advantage.methods._episode_level import Scope, Singleton, episode_level, outcome_credit, penalties
from verl_turnkey.advantage.params import Positive, Ranged
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class GrpoStepsParams(Ranged):
    norm: Norm = "mean_std"  # divide by the group's sample std, or only subtract the mean
    scope: Scope = "outcomes"
    """statistics over outcomes, penalties subtracted from their own step's advantage; or, as in released code, with
    penalties included: over step rows (steps), or over one value per trajectory, its first step's (trajectories)"""
    singleton: Singleton = "zero"  # advantage in a group of one: 0, or its raw score as in verl-agent
    epsilon: Positive = 1e-6  # added to the std


@register_estimator(
    "grpo_steps",
    params=GrpoStepsParams,
    paper="GRPO, arXiv:2402.03300",
    summary="compares each trajectory's outcome with its group; all its steps get the same advantage",
    tier="core",
)
def grpo_steps(batch: StepBatch, params: GrpoStepsParams) -> Credit:
    """``A(i, t) = (R_i - mean_g) / F_g - penalty(i, t)``: every step carries the advantage of its trajectory.

    ``R_i`` is the score, ``F_g`` the sample std plus epsilon (``norm="mean_std"``) or 1 (``norm="mean"``); statistics
    and groups of one as in :func:`verl_turnkey.advantage.methods._episode_level.episode_level`.

    Source: GRPO (DeepSeekMath, arXiv:2402.03300), outcome supervision; on step rows as in verl-agent, which takes the
    statistics over step rows with penalties inside (``scope="steps"``) and gives a group of one its raw score
    (``singleton="score"``).
    """
    episode = episode_level(batch, params.norm, params.scope, params.singleton, params.epsilon)
    return outcome_credit(batch, episode, penalties(batch, params.scope)[1])
