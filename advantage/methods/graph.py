"""Credit from the group's graph of states: how much closer to success a step leads, or what it adds to the value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Norm, group_stats, normalize
from verl_turnkey.advantage.methods._episode_level import Scope, Singleton, episode_level, penalties
from verl_turnkey.advantage.methods._graph import distance_to_success, state_values
from verl_turnkey.advantage.params import check
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class GraphParams:
    """Parameters of ``graph``; the defaults are GraphGPO's, ``gamma`` is that of GRAFT."""

    rule: Literal["graphgpo", "graft"] = "graphgpo"
    """distance to success, compared among the steps from the same state; or differences of the states' values"""
    edge: Literal["paper", "code", "progress"] = "paper"
    """graphgpo: value of a step, decay^(d(s') + 1), or decay^d(s') (released code), or decay^(d(s') - d(s) + 1), its
    progress (an option there)"""
    decay: float = 0.1  # graphgpo: factor for each step of distance
    scale: float = 10.0  # graphgpo: value of a step at exponent 0; only norm=mean depends on it
    step_advantage_w: float = 1.0  # graphgpo: weight of the step level
    norm: Norm = "mean_std"  # graphgpo: divide by the group's sample std, or only subtract the mean; at both levels
    scope: Scope = "outcomes"
    """statistics over outcomes, penalties subtracted from their own step's advantage; or, as in released code, with
    penalties included: over step rows (steps), or over one value per trajectory, its first step's (trajectories)"""
    singleton: Singleton = "zero"  # episode-level advantage in a group of one: 0, or its raw score (released code)
    epsilon: float = 1e-6  # added to the std
    gamma: float = 0.99  # graft: discount of the states' values, one factor per step

    def __post_init__(self) -> None:
        check(0 < self.decay <= 1, "decay", "a number in (0, 1]", self.decay)
        check(0 < self.scale < np.inf, "scale", "a finite number > 0", self.scale)
        check(0 <= self.step_advantage_w < np.inf, "step_advantage_w", "a finite number >= 0", self.step_advantage_w)
        check(0 < self.epsilon < np.inf, "epsilon", "a finite number > 0", self.epsilon)
        check(0 <= self.gamma <= 1, "gamma", "a number in [0, 1]", self.gamma)


@register_estimator(
    "graph",
    params=GraphParams,
    needs=("anchor", "success"),
    paper="GraphGPO, arXiv:2605.26684",
    summary="joins a group's episodes to a graph of states and credits each step by how near to success it leads",
)
def graph(batch: StepBatch, params: GraphParams) -> Credit:
    """Credit of every step from the graph that its group's episodes make: states as nodes, steps as edges.

    ::

        d(s)   = steps from s to success on the shortest way in the graph                     rule="graphgpo"
        q(t)   = scale decay^(d(s(t+1)) + 1)                      (Eq 4; ``edge``)
        A_S(t) = (q(t) - mean) / F           over the steps taken from the same state
        A(t)   = A_E + step_advantage_w A_S(t) - penalty(t)       A_E: the episode level of gigpo

        V(s)   = gamma mean of V(s') over the steps taken from s; after the end: the score    rule="graft"
        A(t)   = gamma V(s(t+1)) - V(s(t)) - penalty(t)

    States are the anchors; the last step of a solved trajectory leads to success, that of another one to
    ``extra["next_anchor"]`` when given, else nowhere. A state without a way to success has the group's largest distance
    plus 1. A group without a success gives A_E alone, and so does a state in which one step was taken. Needs ``anchor``
    and ``success``.

    Source: GraphGPO, arXiv:2605.26684: released recipe (``edge="code"``) and a re-implementation that names Eq 4; the
    exponents differ by a constant factor, which ``mean_std`` removes up to epsilon. Its option to merge similar states
    is not offered. GRAFT, arXiv:2609.28963: a third-party implementation of Eqs 5 to 10; its GraphGAE adds the mean
    differences of the edges further on, each of which is 0 once the values have converged, so they are not computed and
    there is no lambda. Ours: the end of a trajectory counts by its own score, whatever state it ended in, and nothing
    is normalized, as the paper's last step is not known to us.
    """
    _, after = penalties(batch, params.scope)
    metrics = {"credit/groups": float(batch.n_groups)}
    if params.rule == "graft":
        value, step, converged = state_values(batch, params.gamma)
        metrics |= {
            "credit/share_groups_converged": converged,
        }
        return Credit.of_parts(
            {"step_level": step},
            batch.penalty,
            metrics=metrics,
            levels={"state_value": value},
            groups={"step_level": batch.anchor_groups[0]},
        )
    solved = np.bincount(batch.trajectory, weights=batch.success, minlength=batch.n_trajectories) > 0
    here, there = distance_to_success(batch, solved)
    exponent = {"paper": there + 1.0, "code": there, "progress": there - here + 1.0}[params.edge]
    q = params.scale * params.decay**exponent
    anchor_group, n = batch.anchor_groups
    step = normalize(q, anchor_group, group_stats(q, anchor_group, n), params.norm, params.epsilon)
    episode = episode_level(
        batch, norm=params.norm, scope=params.scope, singleton=params.singleton, epsilon=params.epsilon
    )
    return Credit.of_parts(
        {"episode_level": episode, "step_level": params.step_advantage_w * step},
        after,
        metrics={**metrics, "credit/share_steps_with_step_credit": float(np.mean(step != 0)) if n else 0.0},
        levels={"distance": here},
        groups={"episode_level": batch.group, "step_level": anchor_group},
    )
