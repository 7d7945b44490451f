"""A-3PO: decoupled clipping whose proximal policy is interpolated by staleness instead of recomputed."""

from __future__ import annotations

from dataclasses import dataclass

from verl_turnkey.losses.clipping import check_clip, clamp_log_ratio, describe, surrogate
from verl_turnkey.losses.registry import LossInputs, TokenLoss, register_loss


@dataclass(frozen=True)
class A3poParams:
    """Parameters of ``a3po``."""

    clip_low: float = 0.2  # the ratio to the proximal policy is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: float = 0.2  # see clip_low

    def __post_init__(self) -> None:
        check_clip(self.clip_low, self.clip_high)


@register_loss(
    "a3po",
    params=A3poParams,
    needs={"staleness": "the weight versions between the rollout of each row and this update (asynchronous trainers)"},
    paper="A-3PO (AReaL)",
    summary="decoupled PPO with a proximal policy between behaviour and current policy, by staleness",
)
def a3po(inputs: LossInputs, params: A3poParams) -> TokenLoss:
    """Decoupled clipped loss without a forward pass for the proximal policy.

    ::

        a           = (d - 1) / d for d >= 1, else 0             d: staleness in weight versions
        log pi_prox = (1 - a) log pi_beh + a log pi              a constant
        loss        = -(pi_prox / pi_beh) min(u A, clip(u) A)    u = pi / pi_prox

    ``old_log_prob`` is the behaviour policy's; ``staleness`` is a row's or a token's. With d = 1 this is PPO against
    the behaviour policy; the staler a row, the nearer the proximal policy is to the current one, and the wider the
    clip.

    Source: AReaL's documentation (prox_approx, log-linear) and code.
    """
    staleness = inputs.extra["staleness"]
    a = ((staleness - 1) / staleness.clamp(min=1)).clamp(0, 1)
    log_ratio = clamp_log_ratio(inputs.log_prob - inputs.old_log_prob)  # to the behaviour policy
    proximal = a * log_ratio.detach()
    ratio, weight = (log_ratio - proximal).exp(), proximal.exp()
    loss = weight * surrogate(ratio, inputs.advantages, params.clip_low, params.clip_high)
    return TokenLoss(loss, describe(inputs, ratio, params.clip_low, params.clip_high))
