"""AgentOPSD: a belief in success that a teacher's gaps move from turn to turn, and credit by how far each moved it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import (
    Floats,
    Ints,
    compared,
    group_stats,
    normalize,
    previous_values,
    running_sums,
)
from verl_turnkey.advantage.methods._episode_level import solved_trajectories
from verl_turnkey.advantage.methods._step_columns import step_column
from verl_turnkey.advantage.modifying import Estimate, Tokens, register_modifier
from verl_turnkey.advantage.params import Ranged, Unit

_EPSILON = 1e-6  # of the deviation, and how far a belief stays from 0 and 1
_PRIOR = 1e-4  # how far the prior does
_FAR = 500.0  # logits beyond it are belief 0 or 1 all the same, and would overflow


@dataclass(frozen=True)
class AgentOpsdParams(Ranged):
    """Parameters of ``agent_opsd``; the defaults are the released scripts' for ALFWorld, but for the prior."""

    lam: Unit = 0.5  # share of the factor; 1.0 in the released code
    bound: Unit = 0.2  # size of the factor's slope and of its range, [1 - bound, 1 + bound]
    granularity: Literal["turn", "token"] = "turn"
    """what a belief is for: turns of the trajectory, or tokens of a turn, as in the scripts for WebShop and search"""
    prior: Literal["success_rate", "mean_score"] = "success_rate"
    """belief before the first turn: the group's success rate, or its mean score, as in the released code"""

    @property
    def also_needs(self) -> tuple[str, ...]:
        return ("success",) if self.prior == "success_rate" else ()

    @property
    def by_token(self) -> bool:
        return self.granularity == "token"


def of_tokens(advantage: Floats, tokens: Tokens, batch: StepBatch, params: AgentOpsdParams) -> Floats:
    """The same inside each turn: beliefs from the prior over its tokens, z against the tokens of the turn."""
    steps, order = len(batch), np.argsort(tokens.step, kind="stable")
    step, moved = tokens.step[order], tokens.gap[order].cumsum()
    first = np.flatnonzero(np.diff(step, prepend=-1))
    number = np.bincount(step, minlength=steps)
    moved -= np.repeat((moved - tokens.gap[order])[first], number[number > 0])
    change = _changes(moved, _prior(batch, params)[step], np.append(0.0, moved)[:-1], first)
    stats = group_stats(change, step, steps, std="population")
    centred = normalize(change, step, stats, "mean", 0.0)
    z = np.empty_like(change)
    z[order] = centred / (np.sqrt(stats.std[step] ** 2 + _EPSILON) + _EPSILON)
    return _scaled(advantage, z, params)


@register_modifier(
    "agent_opsd",
    params=AgentOpsdParams,
    needs=("extra.teacher_gap",),
    of_tokens=of_tokens,
    paper="AgentOPSD, arXiv:2608.05987",
    summary="scales the credit of each turn by how far it moves a belief in success that a teacher's gaps update",
)
def agent_opsd(batch: StepBatch, params: AgentOpsdParams, estimate: Estimate) -> Credit:
    """Beliefs V of a trajectory with turns k = 0, 1, ... and ``V_-1 = V_0(group)``.

    ::

        logit V_k = logit V_0 + sum of the gaps D of all tokens of turns 0 .. k          V in [1e-6, 1 - 1e-6]
        q_k = V_k - V_{k-1}
        z_k = (q_k - mean q) / (std q + 1e-6)                                              over the trajectory's turns
        A_k = A ((1 - lam) + lam clip(1 + bound sign(A) z_k, 1 - bound, 1 + bound))

    V_0 is the group's success rate in [1e-4, 1 - 1e-4]. A turn without a text has D = 0. A trajectory of one turn, or
    without any gap, keeps its credit.

    Source: the authors' code (ZethWang/AgentOPSD at 0c478b2), whose numbers for turns this has. Its prior is the mean
    score, which is 0.9999 where a success pays 10 and one of eight succeeds (``prior=mean_score``).
    """
    credit = estimate(batch)
    if params.by_token:
        return credit
    gaps = np.nan_to_num(step_column(batch, "agent_opsd", "teacher_gap", gaps=True))
    moved = running_sums(gaps, batch.runs)
    before = previous_values(moved, batch.runs, np.nan)
    change = _changes(moved, _prior(batch, params), before, np.flatnonzero(np.isnan(before)))
    z = compared(change, batch.trajectory, batch.n_trajectories, std="population")
    return replace(credit, advantage=_scaled(credit.advantage, z, params), levels={"belief_change": change})


def _changes(moved: Floats, prior: Floats, before: Floats, first: Ints) -> Floats:
    """How far each entry moves the belief; ``moved``: sums of gaps so far, ``before``: those up to the entry before.

    ``first``: the entries before which there is none.
    """
    logit, before = np.log(prior / (1 - prior)), before.copy()
    before[first] = 0.0
    belief, earlier = (
        np.clip(1 / (1 + np.exp(-np.clip(logit + x, -_FAR, _FAR))), _EPSILON, 1 - _EPSILON) for x in (moved, before)
    )
    return belief - earlier


def _prior(batch: StepBatch, params: AgentOpsdParams) -> Floats:
    """V_0 of each step's group (S,): over trajectories, each once."""
    first = batch.first_rows
    by_success = params.prior == "success_rate"
    outcome = solved_trajectories(batch).astype(np.float64) if by_success else batch.score[first]
    mean = group_stats(outcome, batch.group[first], batch.n_groups).mean
    return np.clip(mean, _PRIOR, 1 - _PRIOR)[batch.group]


def _scaled(advantage: Floats, z: Floats, params: AgentOpsdParams) -> Floats:
    factor = np.clip(1 + params.bound * np.sign(advantage) * z, 1 - params.bound, 1 + params.bound)
    return advantage * (1 + params.lam * (factor - 1))
