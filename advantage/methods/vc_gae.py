"""Decoupled GAE: one lambda for the actor's advantages, another for the critic's targets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Floats, distances, ordinals
from verl_turnkey.advantage.methods._gae import Whiten, describe_critic, gae, td_errors, whiten
from verl_turnkey.advantage.params import Positive, Ranged, Unit
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class VcGaeParams(Ranged):
    """Parameters of ``vc_gae``; the defaults are the paper's."""

    gamma: Unit = 1.0  # discount per turn
    lam_actor: Unit = 0.95  # lambda of the advantages
    length_alpha: Positive | None = None
    """lambda of the advantages from the length of the episode, 1 - 1 / (length_alpha T) for T turns, in the place of
    lam_actor (VAPO); null: off"""
    lam_critic: Unit = 1.0  # lambda of the critic's targets; 1: the plain return
    whiten: Whiten = "turns"  # normalize advantages to mean 0 and std 1 over the turns of the batch, or not


@register_estimator(
    "vc_gae",
    params=VcGaeParams,
    needs=("value",),
    paper="VC-PPO, arXiv:2503.01491",
    summary="generalised advantage estimation over turns, with separate lambdas for actor and critic",
)
def vc_gae(batch: StepBatch, params: VcGaeParams) -> Credit:
    """GAE with one value per turn and decoupled lambdas.

    ::

        delta(n) = r(n) + gamma V(n+1) - V(n)             V(n): value before the first token of turn n; 0 after the end
        A(n)     = delta(n) + gamma lam_actor A(n+1)
        target   = V(n) + sum_k (gamma lam_critic)^k delta(n+k)
        lam_actor = max(0, 1 - 1 / (length_alpha T))      with length_alpha: T, the turns of the episode

    With ``lam_critic=1`` the target is the discounted return, independent of the critic's error. Finally a turn's
    penalty is subtracted from its own advantage and target. Needs ``value``.

    Source: VC-PPO, arXiv:2503.01491, whose steps are tokens; taking turns instead is our reading. Its other half,
    training the critic before the policy, is verl's ``trainer.critic_warmup``. Truncated episodes end with value 0.
    ``length_alpha`` is VAPO's length-adaptive lambda (arXiv:2504.05118), from several restatements: there T are tokens
    and alpha is 0.05. With turns alpha has to be larger, and no value is published; that a lambda below 0 is 0 is our
    reading.
    """
    lam: float | Floats = params.lam_actor
    if params.length_alpha is not None:
        turns = ordinals(batch.runs) + distances(batch.runs) + 1
        lam = np.maximum(0.0, 1.0 - 1.0 / (params.length_alpha * turns))
    delta = td_errors(batch, params.gamma)
    actor = gae(batch, delta, params.gamma, lam)
    returns = gae(batch, delta, params.gamma, params.lam_critic) + batch.value - batch.penalty
    return Credit.of_parts(
        {"gae": whiten(actor, batch, params.whiten)},
        batch.penalty,
        returns,
        metrics=describe_critic(batch, returns),
        levels={"td_error": delta, "value": batch.value},
    )
