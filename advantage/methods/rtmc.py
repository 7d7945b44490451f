"""RTMC: first-visit Monte-Carlo values of states and actions over a group's episodes, smoothed towards its outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np

from verl_turnkey.advantage import group_ops as ops
from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.columns import encode
from verl_turnkey.advantage.group_ops import Ints
from verl_turnkey.advantage.methods._step_columns import key_column
from verl_turnkey.advantage.params import ConfigError, NotNegative, Ranged, Unit
from verl_turnkey.advantage.registry import register_estimator

STATE, ACTION = "extra.state_signature", "extra.action_signature"
SMALLEST_STD = 1e-8  # credit with less spread is not divided by it


@dataclass(frozen=True)
class RtmcParams(Ranged):
    """Parameters of ``rtmc``; the defaults are the paper's, but for ``states``."""

    gamma: Unit = 0.99  # discount of the outcome, one factor per step
    n_prior: NotNegative = 2.0  # n0: visits that the group's mean outcome counts for in the value of a state
    divide_by_std: bool = False  # divide the credit by its population std over the group's steps, without centring
    states: Literal["anchor", "actions", "column"] = "anchor"
    """what makes two states equal: the anchor; the set of earlier actions, in any order and each once (the paper's,
    with signatures of actions); or the column extra.state_signature"""
    actions: Literal["key", "column"] = "key"
    """what makes two actions equal: the key of the parsed action, or the column extra.action_signature"""
    signature: str | None = None
    """module:function of yours from the key of an action to its signature; null: the key itself"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.signature is not None:
            function_of(self.signature)

    @property
    def also_needs(self) -> tuple[str, ...]:
        """Columns that these parameters read."""
        state = {"anchor": ("anchor",), "column": (STATE,), "actions": ()}[self.states]
        return (*state, "action" if self.actions == "key" else ACTION)


@register_estimator(
    "rtmc",
    params=RtmcParams,
    before=(STATE,),
    paper="RTMC, arXiv:2604.11037",
    summary="compares the mean outcome after an action with that of all actions in the same state, smoothed",
)
def rtmc(batch: StepBatch, params: RtmcParams) -> Credit:
    """Value of the action taken minus the smoothed value of the state, from the episodes of a group.

    ::

        Q(s, a) = mean of gamma^(T-1-t) R over the first visits of (s, a), one per trajectory
        V(s)    = mean of the same over the first visits of s with each of its actions; N(s) of them
        V'(s)   = (N V + n_prior p) / (N + n_prior)          p: mean outcome of the group (Eq 11)
        A(t)    = Q(s, a) - V'(s) - penalty(t)

    T is the length of the trajectory and R its outcome. ``divide_by_std``: A is divided by its population std over the
    steps of the group, if that is above 1e-8, before the penalty; the mean stays. p is not discounted, so where all
    outcomes are equal, only episodes of one step get exactly 0.

    A None as state or action matches nothing; with ``states="actions"`` it leaves the set as it is.

    Source: arXiv:2604.11037, from two third-party implementations; no code of the authors is known. The paper's states
    are sets of codes per file (viewed, searched, created, modified with a hash) and flags, its actions
    ``category[:scope]@target[:result]``; these are for tools of a code repository, and the third parties drop the
    hashes, since states hardly recur with them. Here a function or a column of yours makes the signatures. The paper
    calls the division by the std optional; one of the third parties has it on.

    Raises:
        ConfigError: ``signature`` failed for a key, or returned something that cannot be a key.
    """
    action, n_keys = action_codes(batch, params.actions == "column", params.signature)
    if params.states == "actions":
        state = past_actions(batch, action, n_keys)
    else:
        state = batch.anchor if params.states == "anchor" else key_column(batch, "state_signature")[0]
    state, n_states = ops.joint_codes(batch.group, state)
    pair, n_pairs = ops.joint_codes(state, action)

    last = batch.runs.last
    returns = ops.discounted_returns(ops.at_the_end(batch.score, batch.runs, params.gamma), batch.runs, params.gamma)
    order = np.lexsort((-ops.distances(batch.runs), ops.ordinals(batch.runs), batch.trajectory))
    visit, _ = ops.joint_codes(batch.trajectory, pair)
    first = order[np.unique(visit[order], return_index=True)[1]]

    q = ops.group_stats(returns[first], pair[first], n_pairs).mean[pair]
    of_state = ops.group_stats(returns[first], state[first], n_states)
    prior = ops.group_stats(batch.score[last], batch.group[last], batch.n_groups).mean[batch.group]
    visits = of_state.size[state]
    value = (visits * of_state.mean[state] + params.n_prior * prior) / np.maximum(visits + params.n_prior, 1e-300)
    credit = np.where(ops.equal(q, value), 0.0, q - value)
    if params.divide_by_std:
        spread = ops.group_stats(credit, batch.group, batch.n_groups, "population").std[batch.group]
        credit = np.where(spread > SMALLEST_STD, credit / np.maximum(spread, SMALLEST_STD), credit)
    _, state_of_pair = np.unique(pair, return_index=True)
    actions = np.bincount(state[state_of_pair], minlength=n_states)
    return Credit.of_parts(
        {"step_level": credit},
        batch.penalty,
        metrics={
            "credit/groups": float(batch.n_groups),
            "credit/states": float(n_states),
            "credit/share_steps_with_alternatives": float(np.mean(actions[state] >= 2)) if len(batch) else 0.0,
        },
        levels={"action_value": q, "state_value": value},
        groups={"step_level": state, "action_value": pair, "state_value": state},
    )


def action_codes(batch: StepBatch, column: bool, path: str | None) -> tuple[Ints, int]:
    """Code of each step's action (S,), and the number of codes that can recur: those of missing keys are beyond.

    ``column``: the key is ``extra["action_signature"]`` instead of ``batch.action``. ``path``: ``module:function`` from
    a key to its signature; None: the key itself.

    Raises:
        ConfigError: the function raised, or returned something that cannot be a key.
    """
    codes, ids = key_column(batch, "action_signature") if column else (batch.action, batch.ids["action"])
    if path is None:
        return codes, len(ids)
    function = function_of(path)
    try:
        signatures = [function(key) for key in ids]
        codes, ids = encode("signature", [signatures[c] if c < len(ids) else None for c in codes.tolist()], True)
    except Exception as error:  # of the user's function
        raise ConfigError(f"rtmc.signature={path}: {type(error).__name__}: {error}") from error
    return codes, len(ids)


def past_actions(batch: StepBatch, action: Ints, n_keys: int) -> Ints:
    """Code (S,) of the set of actions below ``n_keys`` that the trajectory took before each step."""
    codes: dict[frozenset[int], int] = {}
    result = np.zeros(len(batch), dtype=np.int64)
    taken = action.tolist()
    before = ops.previous_values(np.arange(len(batch)), batch.runs, -1).tolist()
    past: dict[int, frozenset[int]] = {-1: frozenset()}  # up to a row, its own action included
    for row in batch.runs.order.tolist():
        so_far = past[before[row]]
        result[row] = codes.setdefault(so_far, len(codes))
        past[row] = so_far | {taken[row]} if taken[row] < n_keys and taken[row] not in so_far else so_far
    return result


def function_of(path: str) -> Callable[[Any], Any]:
    """The function ``module:function``.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"signature: expected an importable module:function, got {path!r}: {error}") from None
