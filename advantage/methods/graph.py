"""Credit from the group's graph of states: how much closer to success a step leads, or what it adds to the value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, Norm, compared, equal
from verl_turnkey.advantage.methods._episode_level import (
    Scope,
    Singleton,
    episode_level,
    penalties,
    solved_trajectories,
)
from verl_turnkey.advantage.methods._graph import distance_to_success, state_values, visit_values
from verl_turnkey.advantage.params import Finite, NotNegative, Positive, PositiveUnit, Ranged, Unit
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class GraphParams(Ranged):
    """Parameters of ``graph``; the defaults are GraphGPO's, ``gamma`` is that of GRAFT."""

    rule: Literal["graphgpo", "graft", "g2po"] = "graphgpo"
    """distance to success, compared among the steps from the same state; differences of the states' values; or values
    of the next states among the steps from the same state, and rises of the value among all steps of the group"""
    edge: Literal["paper", "code", "progress"] = "paper"
    """graphgpo: value of a step, decay^(d(s') + 1), or decay^d(s') (released code), or decay^(d(s') - d(s) + 1), its
    progress (an option there)"""
    decay: PositiveUnit = 0.1  # graphgpo: factor for each step of distance
    scale: Positive = 10.0  # graphgpo: value of a step at exponent 0; only norm=mean depends on it
    step_advantage_w: NotNegative = 1.0  # graphgpo, g2po: weight of the levels of steps
    norm: Norm = "mean_std"
    """graphgpo, g2po: divide by the group's sample std, or only subtract the mean; at all levels"""
    scope: Scope = "outcomes"
    """statistics over outcomes, penalties subtracted from their own step's advantage; or, as in released code, with
    penalties included: over step rows (steps), or over one value per trajectory, its first step's (trajectories)"""
    singleton: Singleton = "zero"  # episode-level advantage in a group of one: 0, or its raw score (released code)
    epsilon: Positive = 1e-6  # added to the std
    gamma: Unit = 0.99  # graft, g2po (0.95 in its code): discount of the states' values, one factor per step
    success_value: Finite | None = None
    """g2po: value of the end of a solved trajectory (10 in its code, where success scores 10); null: its score"""


@register_estimator(
    "graph",
    params=GraphParams,
    needs=("anchor", "success"),
    paper="GraphGPO, arXiv:2605.26684; GRAFT, arXiv:2609.28963; G2PO, arXiv:2606.22995",
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

        V(s)   = mean of gamma^(steps to the end) R over the visits of s                      rule="g2po"
        A_S(t) = (V(s(t+1)) - mean) / F      over the steps taken from the same state
        A_G(t) = (g(t) - mean) / F           over all steps of the group, g(t) = V(s(t+1)) - V(s(t))
        A(t)   = A_E + step_advantage_w (A_S(t) + A_G(t)) - penalty(t)

    States are the anchors; the last step of a solved trajectory leads to success, that of another one to
    ``extra["next_anchor"]`` when given, else nowhere (g2po: always nowhere, worth 0). A state without a way to success
    has the group's largest distance plus 1. With graphgpo, a group without a success gives A_E alone, and so does a
    state in which one step was taken. Needs ``anchor`` and ``success``.

    Source: GraphGPO, arXiv:2605.26684: released recipe (``edge="code"``) and a re-implementation that names Eq 4; the
    exponents differ by a constant factor, which ``mean_std`` removes up to epsilon. Its option to merge similar states
    is not offered. GRAFT, arXiv:2609.28963: a third-party implementation of Eqs 5 to 10; its GraphGAE adds the mean
    differences of the edges further on, each of which is 0 once the values have converged, so they are not computed and
    there is no lambda. Ours: the end of a trajectory counts by its own score, whatever state it ended in, and nothing
    is normalized, as the paper's last step is not known to us. G2PO, arXiv:2606.22995, released code: gamma 0.95,
    ``scope="steps"`` (penalties inside A_E and A_S); an end is worth 10 if the score is exactly 10, else 0, so that
    scores of 0 and 1 have no success there. Ours: it is worth ``success_value`` where the trajectory has ``success``.
    """
    rules = {"graphgpo": _graphgpo, "graft": _graft, "g2po": _g2po}
    return rules[params.rule](batch, params)


def _graphgpo(batch: StepBatch, params: GraphParams) -> Credit:
    here, there = distance_to_success(batch, solved_trajectories(batch))
    exponent = {"paper": there + 1.0, "code": there, "progress": there - here + 1.0}[params.edge]
    q = params.scale * params.decay**exponent
    return _with_episodes(batch, params, _same_state(batch, params, q), {}, {"distance": here})


def _graft(batch: StepBatch, params: GraphParams) -> Credit:
    value, step, converged = state_values(batch, params.gamma)
    return Credit.of_parts(
        {"step_level": step},
        batch.penalty,
        metrics={"credit/groups": float(batch.n_groups), "credit/share_groups_converged": converged},
        levels={"state_value": value},
        groups={"step_level": batch.anchor_groups[0]},
    )


def _g2po(batch: StepBatch, params: GraphParams) -> Credit:
    success = batch.score if params.success_value is None else np.full(len(batch), params.success_value)
    end = np.where(solved_trajectories(batch)[batch.trajectory], success, 0.0)
    before, after = visit_values(batch, params.gamma, end)
    gain = np.where(equal(after, before), 0.0, after - before)
    rise = params.step_advantage_w * compared(gain, batch.group, batch.n_groups, params.norm, params.epsilon)
    step = _same_state(batch, params, after - penalties(batch, params.scope)[0])
    return _with_episodes(batch, params, step, {"edge_level": rise}, {"state_value": before})


def _same_state(batch: StepBatch, params: GraphParams, values: Floats) -> Floats:
    """``values`` (S,) of the steps, compared among those taken from the same state -> (S,)."""
    return compared(values, *batch.anchor_groups, params.norm, params.epsilon)


def _with_episodes(
    batch: StepBatch, params: GraphParams, step: Floats, more: dict[str, Floats], levels: dict[str, Floats]
) -> Credit:
    """The episode level, the ``step`` level (S,) with its weight, and further parts over the whole group."""
    episode = episode_level(batch, params.norm, params.scope, params.singleton, params.epsilon)
    return Credit.of_parts(
        {"episode_level": episode, "step_level": params.step_advantage_w * step, **more},
        penalties(batch, params.scope)[1],
        metrics={
            "credit/groups": float(batch.n_groups),
            "credit/share_steps_with_step_credit": float(np.mean(step != 0)) if len(batch) else 0.0,
        },
        levels=levels,
        groups={"episode_level": batch.group, "step_level": batch.anchor_groups[0]} | dict.fromkeys(more, batch.group),
    )
