"""Turn-level GAE: generalised advantage estimation where one action is a whole turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, cut_runs, discounted_returns, equal, next_values
from verl_turnkey.advantage.params import check
from verl_turnkey.advantage.registry import register_estimator

Whiten = Literal["turns", "none"]
WHITEN_EPSILON = 1e-8  # added to the variance, as in verl's masked_whiten


@dataclass(frozen=True)
class TurnGaeParams:
    """Parameters of ``turn_gae``; the defaults are the paper's."""

    gamma: float = 0.99  # discount per turn
    lam: float = 0.9  # how far ahead of the critic the estimate looks; 1: to the end of the episode
    whiten: Whiten = "turns"  # advantages to mean 0 and std 1 over the turns of the batch, or as they are
    truncated: Literal["zero", "value"] = "zero"  # worth of what a limit cut off: nothing, or the last value again

    def __post_init__(self) -> None:
        check(0 <= self.gamma <= 1, "gamma", "a number in [0, 1]", self.gamma)
        check(0 <= self.lam <= 1, "lam", "a number in [0, 1]", self.lam)


@register_estimator(
    "turn_gae",
    params=TurnGaeParams,
    needs=("value",),
    paper="Turn-PPO, arXiv:2512.17008",
    summary="generalised advantage estimation over turns, with a critic read before each turn",
)
def turn_gae(batch: StepBatch, params: TurnGaeParams) -> Credit:
    """Advantage of each turn over the critic.

    ::

        delta(n) = r(n) + gamma V(n+1) - V(n)             V(n): value before the first token of turn n
        A(n)     = delta(n) + gamma lam A(n+1)
        target   = A(n) + V(n)                            what the critic learns (Credit.returns)

    V after the end of an episode is 0. An episode that a limit cut off goes on somewhere that nobody has valued:
    ``truncated="zero"`` takes 0 there, ``"value"`` the value of its last turn once more. ``whiten="turns"`` brings
    the advantages, not the targets, to mean 0 and sample std 1 over the turns that have tokens. At the end a turn's
    penalty is subtracted from its own advantage and target. Needs ``value``.

    Source: Turn-PPO, arXiv:2512.17008, from summaries and two third-party implementations; no official code is known.
    Whitening over turns is HiPER-agent's; another implementation whitens over tokens, so that long turns weigh more:
    not offered. What follows a truncated end, and the penalty, are our reading. Not to be confused with the *ratio* per
    turn of ST-PPO, also called Turn-PPO.
    """
    bootstrap = np.where(batch.truncated, batch.value, 0.0) if params.truncated == "value" else 0.0
    advantage = gae(batch, params.gamma, params.lam, bootstrap)
    returns = advantage + batch.value - batch.penalty
    return Credit(whiten(advantage, batch, params.whiten) - batch.penalty, returns, describe_critic(batch, returns))


def gae(batch: StepBatch, gamma: float, lam: float, bootstrap: Floats | float = 0.0) -> Floats:
    """GAE of every turn, (S,); ``bootstrap`` (a number or (S,)) is the value after an episode's last turn.

    A turn flagged ``terminated`` ends its episode wherever it stands.
    """
    unknown = np.flatnonzero(np.isnan(batch.value))
    if len(unknown):
        raise ValueError(
            f"value: row {unknown[0]} is nan: expected the critic's value before each of the {len(batch)} turns"
        )
    episodes = cut_runs(batch.runs, batch.terminated)
    following = next_values(batch.value, episodes, np.where(batch.terminated, 0.0, bootstrap))
    delta = batch.reward + gamma * following - batch.value
    return discounted_returns(delta, episodes, gamma * lam)


def whiten(advantage: Floats, batch: StepBatch, how: Whiten) -> Floats:
    """Mean 0 and sample std 1 over the turns that have tokens (all, when nobody counted tokens)."""
    counted = advantage[batch.tokens > 0] if "tokens" in batch.given else advantage
    if how == "none":
        return advantage
    if len(counted) < 2 or equal(counted.min(), counted.max()):
        return np.zeros(len(advantage))
    counted = np.sort(counted)  # so that the order of the rows changes no bit
    return (advantage - counted.mean()) / np.sqrt(counted.var(ddof=1) + WHITEN_EPSILON)


def describe_critic(batch: StepBatch, returns: Floats) -> dict[str, float]:
    """How well the values foretold the targets: mean of both, and the share of the targets' variance explained."""
    if not len(batch):
        return {}
    metrics = {"credit/value/mean": float(batch.value.mean()), "credit/return/mean": float(returns.mean())}
    if not equal(returns.min(), returns.max()):
        metrics["credit/explained_variance"] = float(1 - (returns - batch.value).var() / returns.var())
    return metrics
