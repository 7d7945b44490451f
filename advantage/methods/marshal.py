"""MARSHAL: the returns of each turn, centred among the turns of the same role."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, Ints, compared, discounted_returns, equal, group_stats
from verl_turnkey.advantage.methods._gae import WHITEN_EPSILON, whiten_tokens
from verl_turnkey.advantage.methods._step_columns import read_roles, role_metrics
from verl_turnkey.advantage.params import Ranged, Unit
from verl_turnkey.advantage.registry import register_estimator

STD_EPSILON = 1e-6  # added to the stds, as in the released code


@dataclass(frozen=True)
class MarshalParams(Ranged):
    """Parameters of ``marshal``; the defaults are the paper's: sum first, then normalize by role.

    The released runs have reward_norm=mean, whiten_rewards=true, advantage_norm=distinct_mean, whiten_advantages=true.
    """

    gamma: Unit = 1.0  # discount of the returns, one factor per turn of the role
    reward_norm: Literal["none", "mean", "mean_std"] = "none"
    """rewards against those of the role's turns, before summing"""
    whiten_rewards: bool = False
    """divide rewards by their std over the response tokens, one token of a turn carrying it"""
    advantage_norm: Literal["mean", "mean_std", "distinct_mean", "none"] = "mean"
    """returns against those of the role's turns; distinct_mean: against the mean of the different values that occur,
    and 0 (released code)"""
    whiten_advantages: bool = False  # normalize advantages to mean 0 and std 1 over the response tokens of the batch


@register_estimator(
    "marshal",
    params=MarshalParams,
    needs=("extra.role",),
    before=("extra.role",),
    paper="MARSHAL, arXiv:2510.15414",
    summary="sums each role's rewards from the turn on, and compares them with the other turns of that role; self-play",
    tier="reproduced",
)
def marshal(batch: StepBatch, params: MarshalParams) -> Credit:
    """Turn-level advantage, normalized for each role.

    ::

        r'(t) = r(t) - mean of r over the role's turns                    reward_norm
        r''   = r' / std of r' over the response tokens                   whiten_rewards
        G(t)  = r''(t) + gamma G(next turn of the same role)
        A(t)  = G(t) - mean of G over the role's turns                    advantage_norm
        A     = (A - mean) / std over the response tokens                 whiten_advantages
        and minus the turn's own penalty

    Roles are those of ``extra.role``, over the whole batch. A trajectory may hold one player's turns or those of
    several: the returns of a role skip the turns of the others. A role whose returns are all G gets 0; under
    ``distinct_mean``, which adds a 0, it gets G / 2, and 0 only if ``whiten_advantages`` finds the same on all tokens.

    Source: MARSHAL, arXiv:2510.15414 (summaries of the paper) and its released code. By default the paper's order, sum
    and then normalize, without a division by a std, is taken; that ``advantage_norm`` is a plain mean over turns is our
    reading. The released code normalizes twice, and its second mean is over the distinct values of G, to which padding
    adds a 0 (``distinct_mean``, compared with its outputs); its first mean is over a role's turns in one game
    group, here over those in the batch: let ``extra.role`` name game and player where games differ. With
    ``reward_norm="none"`` its ``whiten_rewards`` would subtract the mean from every token, here rewards are divided
    only.
    """
    roles = read_roles(batch)
    reward = _against(batch.reward, roles.role, len(roles.ids), params.reward_norm)
    if params.whiten_rewards:
        reward = reward / _token_std(reward, batch)
    returns = discounted_returns(reward, roles.runs, params.gamma)
    if params.advantage_norm == "distinct_mean":
        advantage = returns - _distinct_means(returns, roles.role, len(roles.ids))[roles.role]
    else:
        advantage = _against(returns, roles.role, len(roles.ids), params.advantage_norm)
    if params.whiten_advantages:
        advantage = whiten_tokens(advantage, batch)
    return Credit.of_parts(
        {"role_level": advantage},
        batch.penalty,
        metrics=role_metrics("return", returns, roles.role, roles),
        levels={"role_return": returns},
        groups={"role_level": roles.role},
    )


def _against(values: Floats, codes: Ints, n: int, norm: Literal["none", "mean", "mean_std"]) -> Floats:
    return values if norm == "none" else compared(values, codes, n, norm, STD_EPSILON)


def _token_std(reward: Floats, batch: StepBatch) -> float:
    """Sample std over all response tokens, one of each turn carrying the turn's reward and the others 0."""
    tokens = batch.tokens if "tokens" in batch.given else np.ones(len(reward), dtype=np.int64)
    values, times = np.append(reward, 0.0), np.append(tokens > 0, np.maximum(tokens - 1, 0).sum())
    spread = group_stats(values, np.zeros(len(values), dtype=np.int64), 1, weights=times).std[0]
    return float(np.sqrt(spread**2 + WHITEN_EPSILON)) if spread else np.inf  # no spread: nothing is left of the rewards


def _distinct_means(values: Floats, codes: Ints, n: int) -> Floats:
    """Mean over the different values of each role, and 0: (n,)."""
    both, of = np.append(values, np.zeros(n)), np.append(codes, np.arange(n))
    order = np.lexsort((both, of))
    both, of = both[order], of[order]
    new = np.ones(len(both), dtype=bool)
    new[1:] = (of[1:] != of[:-1]) | ~equal(both[1:], both[:-1])
    return group_stats(both[new], of[new], n).mean
