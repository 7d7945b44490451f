"""PPO's clipped surrogate, shared by the losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_turnkey.losses.registry import LossInputs, TokenLoss

#: Log-ratios are clamped to it: exp(20) times any advantage is far from overflow, and no useful ratio is that large.
MAX_LOG_RATIO = 20.0


def clamp_log_ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Where the surrogate's minimum is its constant (clipped) side, so that the gradient is zero."""
    return ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))


def surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None) -> Tensor:
    """``-min(ratio A, clip(ratio, 1 - low, 1 + high) A)``, with ``dual_clip=c`` at most ``-c A`` where A < 0."""
    loss = torch.maximum(-ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss


def describe(
    inputs: LossInputs, ratio: Tensor, low: float, high: float, dual_clip: float | None = None
) -> dict[str, Any]:
    """Clip fractions and KL in verl's terms, as means over the tokens of the mask; the range of the ratio."""
    with torch.no_grad():
        tokens = inputs.mask.sum().clamp(min=1)
        log_ratio = (inputs.log_prob - inputs.old_log_prob) * inputs.mask
        # All keys are always present: verl adds metrics up over micro-batches and ranks, and one may hold no model
        # token.
        of_tokens = ratio[inputs.mask] if inputs.mask.any() else ratio.new_ones(1)
        metrics = {
            "pg_clipfrac": (clipped(ratio, inputs.advantages, low, high) & inputs.mask).sum() / tokens,
            "ppo_kl": -log_ratio.sum() / tokens,
            "ratio/min": of_tokens.min(),
            "ratio/max": of_tokens.max(),
            "ratio/mean": of_tokens.mean(),
        }
        if dual_clip is not None:
            lower = (inputs.advantages < 0) & (ratio > dual_clip)
            metrics["pg_clipfrac_lower"] = (lower & inputs.mask).sum() / tokens
        return {key: value.item() for key, value in metrics.items()}


def ratio_loss(
    inputs: LossInputs,
    loss: Tensor,
    ratio: Tensor,
    low: float,
    high: float,
    dual_clip: float | None = None,
    bias: Tensor | None = None,
) -> TokenLoss:
    """The result of a loss over importance ratios ``ratio`` (B, L) with these bounds, with its metrics."""
    outside = clipped(ratio, inputs.advantages, low, high) & inputs.mask
    return TokenLoss(loss, describe(inputs, ratio, low, high, dual_clip), bias, ratio.detach(), outside)
