"""A-3PO: decoupled clipping whose proximal policy is interpolated by staleness instead of recomputed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from verl_turnkey.advantage.params import BelowOne, NotNegative, Range, Ranged
from verl_turnkey.losses.clipping import clamp_log_ratio, ratio_loss, surrogate
from verl_turnkey.losses.registry import LossInputs, TokenLoss, register_loss

Cap = Annotated[float, Range(lambda x: 1 < x < math.inf, "a finite number > 1")]


@dataclass(frozen=True)
class A3poParams(Ranged):
    """Parameters of ``a3po``; the defaults are those of AReaL's example."""

    clip_low: BelowOne = 0.2  # the ratio to the proximal policy is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: NotNegative = 0.2  # see clip_low
    current_version: Literal["before_update", "after_update"] = "before_update"
    """staleness counts up to the weights before this update (AReaL's code), or to those after it"""
    weight_cap: Cap | None = 5.0  # tokens whose pi_prox / pi_rollout exceeds it have no gradient; null: no cap


@register_loss(
    "a3po",
    params=A3poParams,
    needs={"staleness": "the weight versions between the rollout of each turn and this step (asynchronous trainers)"},
    paper="A-3PO, arXiv:2512.06547 (AReaL)",
    summary="decoupled PPO; interpolates the proximal policy between behaviour and current policy by staleness",
)
def a3po(inputs: LossInputs, params: A3poParams) -> TokenLoss:
    """Decoupled clipped loss without a forward pass for the proximal policy.

    ::

        d           = staleness (current_version="before_update"), or staleness + 1 ("after_update")
        a           = (d - 1) / d for d >= 1, else 0
        log pi_prox = (1 - a) log pi_beh + a log pi              a constant
        loss        = -(pi_prox / pi_beh) min(u A, clip(u) A)    u = pi / pi_prox; 0 where pi_prox / pi_beh > weight_cap

    ``old_log_prob`` is the behaviour policy's. ``staleness``, (B,) or (B, L), is the number of weight versions between
    the rollout of a row or of a turn and the weights before this update: 0 on policy. Where a = 0 this is PPO against
    the behaviour policy, by default up to a staleness of 1. With growing staleness the proximal policy approaches the
    current one, and the clip range gets wider. A token beyond ``weight_cap`` has no gradient but still counts in the
    mean.

    Source: arXiv:2512.06547, after AReaL's documentation (prox_approx, log-linear) and code, which reads the current
    version before the update; the cap is the token rejection of its example. ``"after_update"`` counts up to the
    version that the update creates, so that the proximal policy is the weights before it.
    """
    distance = inputs.extra["staleness"] + (params.current_version == "after_update")
    a = ((distance - 1) / distance.clamp(min=1)).clamp(0, 1)
    log_ratio = clamp_log_ratio(inputs.log_prob - inputs.old_log_prob)  # to the behaviour policy
    proximal = a * log_ratio.detach()
    ratio, weight = (log_ratio - proximal).exp(), proximal.exp()
    kept = weight <= (math.inf if params.weight_cap is None else params.weight_cap)
    loss = weight * kept * surrogate(ratio, inputs.advantages, params.clip_low, params.clip_high)
    term = ratio_loss(inputs, loss, ratio, params.clip_low, params.clip_high)
    term.metrics["share_of_tokens_over_cap"] = ((~kept & inputs.mask).sum() / inputs.mask.sum().clamp(min=1)).item()
    return term
