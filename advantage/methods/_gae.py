"""Shared by the methods with a critic: GAE, whitening, and the critic's metrics."""

from __future__ import annotations

from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.group_ops import Floats, cut_runs, discounted_returns, equal, group_stats, next_values
from verl_turnkey.advantage.methods._episode_level import token_counts

Whiten = Literal["turns", "none"]
WHITEN_EPSILON = 1e-8  # added to the variance, as in verl's masked_whiten


def td_errors(batch: StepBatch, gamma: float, bootstrap: Floats | float = 0.0) -> Floats:
    """``r + gamma V' - V`` of every turn, (S,); ``bootstrap`` (a number or (S,)) is V' of an episode's last turn.

    A turn flagged ``terminated`` ends its episode, even if further turns follow.
    """
    unknown = np.flatnonzero(np.isnan(batch.value))
    if len(unknown):
        raise ValueError(
            f"value: row {unknown[0]} is nan: expected the critic's value before each of the {len(batch)} turns"
        )
    episodes = cut_runs(batch.runs, batch.terminated)
    following = next_values(batch.value, episodes, np.where(batch.terminated, 0.0, bootstrap))
    return batch.rewards(gamma) + gamma * following - batch.value


def gae(batch: StepBatch, delta: Floats, gamma: float, lam: float | Floats) -> Floats:
    """GAE of every turn, (S,), of its TD errors ``delta`` (S,); ``lam`` is one number, or one for each turn, (S,)."""
    return discounted_returns(delta, cut_runs(batch.runs, batch.terminated), gamma * lam)


def whiten(advantage: Floats, batch: StepBatch, how: Whiten) -> Floats:
    """Normalise to mean 0 and sample std 1 over the turns with tokens (all turns if the batch has no ``tokens``)."""
    mean, std = moments(advantage, batch, how)
    return (advantage - mean) / std


def moments(advantage: Floats, batch: StepBatch, how: Whiten) -> tuple[float, float]:
    """What ``whiten`` subtracts, and what it then divides by: infinity where all turns with tokens are equal."""
    counted = advantage[batch.tokens > 0] if "tokens" in batch.given else advantage
    if how == "none":
        return 0.0, 1.0
    if len(counted) < 2 or equal(counted.min(), counted.max()):
        return 0.0, np.inf
    counted = np.sort(counted)  # so that the order of the rows changes no bit
    return float(counted.mean()), float(np.sqrt(counted.var(ddof=1) + WHITEN_EPSILON))


def whiten_tokens(values: Floats, batch: StepBatch) -> Floats:
    """Normalise to mean 0 and sample std 1 over the response tokens, which carry their turn's value -> (S,).

    Without the column ``tokens`` each turn counts once.
    """
    stats = group_stats(values, np.zeros(len(batch), dtype=np.int64), 1, weights=token_counts(batch))
    if not stats.std[0]:
        return np.zeros(len(batch))
    return (values - stats.mean[0]) / np.sqrt(stats.std[0] ** 2 + WHITEN_EPSILON)


def describe_critic(batch: StepBatch, returns: Floats) -> dict[str, float]:
    """How well the values predict the targets: the mean of these, and the share of their variance explained."""
    if not len(batch):
        return {}
    metrics = {"credit/return/mean": float(returns.mean())}
    if not equal(returns.min(), returns.max()):
        metrics["credit/explained_variance"] = float(1 - (returns - batch.value).var() / returns.var())
    return metrics
