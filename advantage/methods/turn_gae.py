"""Turn-level GAE: generalised advantage estimation where one action is a whole turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.methods._gae import Whiten, describe_critic, gae, td_errors, whiten
from verl_turnkey.advantage.params import Ranged, Unit
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class TurnGaeParams(Ranged):
    """Parameters of ``turn_gae``; the defaults are the paper's."""

    gamma: Unit = 0.99  # discount per turn
    lam: Unit = 0.9  # lambda of GAE; 1: the return to the end of the episode
    whiten: Whiten = "turns"  # normalize advantages to mean 0 and std 1 over the turns of the batch, or not
    truncated: Literal["zero", "value"] = "zero"  # value after a truncated episode: 0, or the last value again


@register_estimator(
    "turn_gae",
    params=TurnGaeParams,
    needs=("value",),
    paper="Turn-PPO, arXiv:2512.17008",
    summary="generalised advantage estimation over turns, with the critic's value before each turn",
    tier="core",
)
def turn_gae(batch: StepBatch, params: TurnGaeParams) -> Credit:
    """GAE with one value per turn.

    ::

        delta(n) = r(n) + gamma V(n+1) - V(n)             V(n): value before the first token of turn n
        A(n)     = delta(n) + gamma lam A(n+1)
        target   = A(n) + V(n)                            what the critic learns (Credit.returns)

    V after the end of an episode is 0. The state after a truncated episode has no value from the critic:
    ``truncated="zero"`` takes 0, ``"value"`` the value of the last turn once more. ``whiten="turns"`` normalizes the
    advantages, not the targets, to mean 0 and sample std 1 over the turns that have tokens. Finally a turn's penalty is
    subtracted from its own advantage and target. Needs ``value``.

    Source: Turn-PPO, arXiv:2512.17008, from summaries and two third-party implementations; no official code is known.
    Whitening over turns is HiPER-agent's; another implementation whitens over tokens, so that long turns weigh more:
    not offered. The value after a truncated episode, and the penalty, are our reading. Not to be confused with the
    ratio per turn of ST-PPO, also called Turn-PPO.
    """
    bootstrap = np.where(batch.truncated, batch.value, 0.0) if params.truncated == "value" else 0.0
    delta = td_errors(batch, params.gamma, bootstrap)
    advantage = gae(batch, delta, params.gamma, params.lam)
    returns = advantage + batch.value - batch.penalty
    return Credit.of_parts(
        {"gae": whiten(advantage, batch, params.whiten)},
        batch.penalty,
        returns,
        metrics=describe_critic(batch, returns),
        levels={"td_error": delta, "value": batch.value},
    )
