"""GiGPO: advantages at two levels, the trajectory against its group and the step against its anchor group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Norm, compared, describe_groups
from verl_turnkey.advantage.methods._episode_level import Scope, Singleton, episode_level, penalties
from verl_turnkey.advantage.methods._similarity import similar_states
from verl_turnkey.advantage.params import NotNegative, Positive, Range, Ranged, Unit
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class GigpoParams(Ranged):
    """Parameters of ``gigpo``; the defaults are the paper's."""

    gamma: Unit = 0.95  # discount of the step returns
    step_advantage_w: NotNegative = 1.0  # omega: weight of the step level
    norm: Norm = "mean_std"  # F: the group's sample std, or 1; the same at both levels
    scope: Scope = "outcomes"
    """statistics over outcomes, penalties subtracted from their own step's advantage; or, as in released code, with
    penalties included: over step rows (steps), or over one value per trajectory, its first step's (trajectories)"""
    singleton: Singleton = "zero"  # episode-level advantage in a group of one: 0, or its raw score (released code)
    similarity: Annotated[float, Range(lambda x: 0 < x < 1, "in (0, 1)")] | None = None
    """also compare states whose texts have at least this difflib ratio, in (0, 1) (released code); null: off"""
    epsilon: Positive = 1e-6  # added to the std

    @property
    def compares_texts(self) -> bool:
        """Whether the steps need their observation texts."""
        return self.similarity is not None


@register_estimator(
    "gigpo",
    params=GigpoParams,
    needs=("anchor",),
    paper="GiGPO, arXiv:2505.10978",
    summary="compares each trajectory with its group, and each step with all steps taken from the same state",
    tier="core",
)
def gigpo(batch: StepBatch, params: GigpoParams) -> Credit:
    """Group-in-group advantage of every step.

    ::

        R(i,t)   = r(i,t) + gamma R(i,t+1)                             step return           (Eq 5)
        A_E(i)   = (R_i - mean_g) / F_g                                episode level         (Eq 3)
        G(s)     = { (j,k) in the same group : s(j,k) = s }            anchor group          (Eq 6)
        A_S(i,t) = (R(i,t) - mean_G) / F_G                             step level            (Eq 7)
        A(i,t)   = A_E(i) + step_advantage_w A_S(i,t) - penalty(i,t)                         (Eq 8, and the penalty)

    ``F`` is the sample std plus epsilon (``norm="mean_std"``) or 1 (``norm="mean"``). Needs ``anchor``. The penalty of
    an invalid action changes no other step's advantage, unless ``scope`` is one of the released code's. A state that
    occurs once in its group has A_S = 0; one that a single trajectory visits twice is a group of two.
    ``Credit.returns`` is R(i,t) minus the penalty. ``similarity`` puts steps with similar texts (``text`` when given,
    else the anchors) into one anchor group, by the greedy rule of
    :func:`~verl_turnkey.advantage.methods._similarity.similar_states`.

    Source: arXiv:2505.10978; released code verl-agent ``gigpo/core_gigpo.py``. Where they differ: the code subtracts
    penalties from returns and scores before both levels, and computes episode statistics over step rows
    (``scope="steps"``) or over first steps (``scope="trajectories"``); it gives a group of one its raw score
    (``singleton="score"``); it discounts in the order of the batch's rows, we in the order of steps; it computes in
    float32, where the division amplifies the rounding of a constant group, we give exactly 0. That a group of one gets
    0 is our reading.
    """
    returns = batch.returns(params.gamma)
    inside, after = penalties(batch, params.scope)
    episode = episode_level(batch, params.norm, params.scope, params.singleton, params.epsilon)
    if params.similarity is None:
        anchor_group, n = batch.anchor_groups
        groups = {}  # every method logs those of equal states
    else:
        anchor_group, n = similar_states(batch, params.similarity)
        groups = describe_groups("anchor", anchor_group, n)
    earned = returns - inside
    step = compared(earned, anchor_group, n, params.norm, params.epsilon)
    metrics = {
        "credit/groups": float(batch.n_groups),
        **groups,
        "credit/share_steps_with_step_credit": float(np.mean(step != 0)) if n else 0.0,
    }
    return Credit.of_parts(
        {"episode_level": episode, "step_level": params.step_advantage_w * step},
        after,
        returns - batch.penalty,
        metrics=metrics,
        groups={"episode_level": batch.group, "step_level": anchor_group},
    )
