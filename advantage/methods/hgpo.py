"""HGPO: steps are compared in groups that share increasingly more history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import (
    Floats,
    Ints,
    Norm,
    Std,
    group_stats,
    joint_codes,
    normalize,
    previous_values,
)
from verl_turnkey.advantage.methods._episode_level import Scope, Singleton, episode_level, penalties
from verl_turnkey.advantage.params import Count, NotNegative, Positive, Ranged, Unit
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class HgpoParams(Ranged):
    """Parameters of ``hgpo``; the defaults are the paper's, but for ``std``, which it does not name."""

    gamma: Unit = 0.95  # discount of the step returns
    history: Count = 2  # K: most past states that must agree; as many as the prompt shows (turnkey.rollout.history)
    alpha: NotNegative = 1.0  # growth of the weight with depth; 0: equal weights
    norm: Norm = "mean_std"  # divide by the group's std, or only subtract the mean; the same at all levels
    std: Std = "population"  # std of the step levels (the released code's; the paper does not say)
    weights: Literal["paper", "code"] = "paper"  # level k weighs (k+1)^alpha, or (k+2)^alpha (released code)
    episode_level: bool = False  # add the trajectory's own advantage as one more level of weight 1
    scope: Scope = "outcomes"
    """statistics over outcomes, penalties subtracted from their own step's advantage; or, as in released code, with
    penalties included: over step rows (steps), or over one value per trajectory, its first step's (trajectories)"""
    singleton: Singleton = "zero"  # episode-level advantage in a group of one: 0, or its raw score (released code)
    epsilon: Positive = 1e-6  # added to the std


@register_estimator(
    "hgpo",
    params=HgpoParams,
    needs=("anchor",),
    paper="HGPO, arXiv:2602.22817",
    summary="compares each step with the steps from the same state, and with those that also share its history",
    tier="core",
)
def hgpo(batch: StepBatch, params: HgpoParams) -> Credit:
    """Hierarchy-of-groups advantage of every step.

    ::

        C_k(t) = (s(t-k), ..., s(t))                            context of depth k = 0..history
        G_k    = { steps of the same group with equal C_k }     G_0 is GiGPO's anchor group
        A_k    = (R - mean of G_k) / F                          0 in a group of one
        A      = sum_k w_k A_k / sum_k w_k - penalty            over the levels with A_k != 0
        w_k    = (k + 1)^alpha

    ``R`` is the discounted return, ``F`` the group's std plus epsilon (``norm="mean_std"``) or 1. A step with fewer
    than k predecessors has no level k. If all A_k are 0, the advantage is minus the penalty. The penalty changes no
    other step's advantage, unless ``scope`` is one of the released code's. ``episode_level=True`` adds the episode
    level of ``gigpo`` as one more level of weight 1. Needs ``anchor``. ``Credit.returns`` is R minus the penalty.

    Source: arXiv:2602.22817, from detailed notes of the paper; released code: verl-agent ``recipe/hgpo``. Where they
    differ: the code weighs level k by (k+2)^alpha and adds epsilon to the sum of the weights (``weights="code"``); it
    subtracts penalties from the returns before all levels, and its episode level counts step rows (``scope="steps"``,
    ``singleton="score"``). Our reading, as in the code: a level is left out by the step's own A_k = 0, also for a step
    that is exactly average; the std is the population's.
    """
    returns = batch.returns(params.gamma)
    inside, after = penalties(batch, params.scope)
    earned = returns - inside
    metrics = {"credit/groups": float(batch.n_groups)}
    levels: dict[str, Floats] = {}
    groups: dict[str, Ints] = {}
    weights: dict[str, Floats] = {}

    def add(name: str, level: Floats, weight: float, group: Ints) -> None:
        levels[name], groups[name] = level, group
        weights[name] = np.where(level != 0, weight, 0.0)

    first_weight = 1 if params.weights == "paper" else 2
    context, n = batch.anchor_groups
    reaches = np.ones(len(batch), dtype=bool)  # has k predecessors
    for k in range(params.history + 1):
        if k:  # the context of depth k: that of depth k - 1 one step earlier, and the state now
            earlier = previous_values(context, batch.runs, first=-1)
            reaches = previous_values(reaches.astype(np.int64), batch.runs, first=0).astype(bool)
            context, n = joint_codes(np.where(reaches, earlier, 0), batch.anchor)
        level = np.zeros(len(batch))
        if reaches.any():
            rows = np.flatnonzero(reaches)
            stats = group_stats(earned[rows], context[rows], n, params.std)
            level[rows] = normalize(earned[rows], context[rows], stats, params.norm, params.epsilon)
            shared = np.count_nonzero(stats.size[context[rows]] >= 2) / len(batch)
            metrics[f"credit/level_{k}/share_steps_in_groups"] = float(shared)
        add(f"level_{k}", level, (k + first_weight) ** params.alpha, np.where(reaches, context, -1))
    if params.episode_level:
        episode = episode_level(batch, params.norm, params.scope, params.singleton, params.epsilon)
        add("episode_level", episode, 1.0, batch.group)

    weight = sum(weights.values())
    scale = np.where(weight > 0, weight + (params.epsilon if params.weights == "code" else 0.0), 1.0)
    shares = {name: weight / scale for name, weight in weights.items()}
    return Credit.of_parts(
        {name: shares[name] * level for name, level in levels.items()},
        after,
        returns - batch.penalty,
        total=sum(weights[name] * level for name, level in levels.items()) / scale,
        metrics=metrics,
        levels={f"weight_of_{name}": share for name, share in shares.items()},
        groups=groups,
    )
