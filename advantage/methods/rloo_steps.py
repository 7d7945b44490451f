"""RLOO on step rows: every step carries its trajectory's outcome against the mean of the other ones of the group."""

from __future__ import annotations

from dataclasses import dataclass

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.methods._episode_level import Scope, Singleton, leave_one_out, outcome_credit, penalties
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class RlooStepsParams:
    scope: Scope = "outcomes"
    """statistics over outcomes, penalties subtracted from their own step's advantage; or, as in released code, with
    penalties included: over step rows (steps), or over one value per trajectory, its first step's (trajectories)"""
    singleton: Singleton = "zero"  # advantage in a group of one: 0, or its raw score


@register_estimator(
    "rloo_steps",
    params=RlooStepsParams,
    paper="RLOO, arXiv:2402.14740",
    summary="compares each trajectory's outcome with the mean of the others of its group; no division by a deviation",
    tier="core",
)
def rloo_steps(batch: StepBatch, params: RlooStepsParams) -> Credit:
    """``A(i, t) = R_i - mean of the other R_j of the group - penalty(i, t)``: the leave-one-out baseline.

    ::

        A(i, t) = n / (n - 1) (R_i - mean_g) - penalty(i, t)      the same, with the mean over all n values

    ``n`` counts the trajectories of the group; with ``scope="steps"`` its step rows, so that a trajectory is compared
    with its own other steps too. Statistics and groups of one as in
    :func:`verl_turnkey.advantage.methods._episode_level.leave_one_out`.

    Source: RLOO (Ahmadian et al., arXiv:2402.14740); on step rows as in verl-agent, which counts step rows
    (``scope="steps"``), with penalties inside. LOOP (arXiv:2502.01600) has the same advantage beside a loss of its own.
    """
    advantage = leave_one_out(batch, params.scope, params.singleton)
    return outcome_credit(batch, advantage, penalties(batch, params.scope)[1])
