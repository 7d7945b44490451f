"""Importance ratios and their bounds: PPO's clipped surrogate; weights per token, turn or row, truncated or masked.

SeeUPO's accumulated ratio, too: each turn's update is weighted by the importance ratios of the turns updated before it.
It is for a training loop that goes through the turns in reverse order: the advantages are the estimator ``seeupo``'s,
the loss a sequence ratio with PPO's clip (``turn_ratio`` on rows of one turn, verl's ``gspo``).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from verl_turnkey.losses.registry import LossInputs, TokenLoss
from verl_turnkey.losses.turns import Turns, like, row_offsets

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


def ratio_loss(
    inputs: LossInputs,
    loss: Tensor,
    ratio: Tensor,
    low: float,
    high: float,
    dual_clip: float | None = None,
    bias: Tensor | None = None,
) -> TokenLoss:
    """The result of a loss over importance ratios ``ratio`` (B, L) with these bounds.

    Its metrics: clip fractions and KL in verl's terms, as means over the tokens of the mask; the range of the ratio.
    """
    outside = clipped(ratio, inputs.advantages, low, high) & inputs.mask
    with torch.no_grad():
        tokens = inputs.mask.sum().clamp(min=1)
        log_ratio = (inputs.log_prob - inputs.old_log_prob) * inputs.mask
        # All keys are always present: verl adds metrics up over micro-batches and ranks, and one may hold no model
        # token.
        of_tokens = ratio[inputs.mask] if inputs.mask.any() else ratio.new_ones(1)
        metrics = {
            "pg_clipfrac": outside.sum() / tokens,
            "ppo_kl": -log_ratio.sum() / tokens,
            "ratio/min": of_tokens.min(),
            "ratio/max": of_tokens.max(),
            "ratio/mean": of_tokens.mean(),
        }
        if dual_clip is not None:
            lower = (inputs.advantages < 0) & (ratio > dual_clip)
            metrics["pg_clipfrac_lower"] = (lower & inputs.mask).sum() / tokens
        numbers = {key: value.item() for key, value in metrics.items()}
    return TokenLoss(loss, numbers, bias, ratio.detach(), outside)


Level = Literal["token", "turn", "sequence"]
Outside = Literal["truncate", "zero_weight", "clear_mask"]


def units_of(level: Level, mask: Tensor, turns: Turns) -> Turns:
    """The tokens that share a weight: single tokens, the ``turns``, or all tokens of a row.

    Args:
        mask: (B, L) or jagged, before any rejection; tokens outside it are in no unit.
        turns: of that mask.
    """
    if level == "turn":
        return turns
    flat = (mask.values() if mask.is_nested else mask.reshape(-1)).bool()
    if level == "token":
        number, n = flat.cumsum(0) - 1, int(flat.sum())
    elif mask.is_nested:
        number, n = torch.repeat_interleave(row_offsets(mask).diff(), output_size=len(flat)), len(mask)
    else:
        number, n = torch.arange(len(mask), device=mask.device).repeat_interleave(mask.shape[1]), len(mask)
    index = torch.where(flat, number, n)
    return Turns(like(index, mask), n, torch.bincount(index, minlength=n + 1)[:n])


def importance_weights(
    log_ratio: Tensor,
    units: Turns,
    *,
    ratio: Literal["product", "geometric"] = "product",
    outside: Outside = "truncate",
    high: float = 2.0,
    low: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The weight of each unit k, (n,) float64, and whether it lies within the bounds, (n,) bool.

    ::

        r_t = log pi_old(token t) - log pi_rollout(token t)
        w_k = exp( sum  over unit k of r_t )        ratio="product"
        w_k = exp( mean over unit k of r_t )        ratio="geometric"

        min(w_k, high)                              outside="truncate"                    (TIS)
        w_k if low <= w_k <= high else 0            outside="zero_weight", "clear_mask"   (MIS)

    The sum is clamped to +-20, as in verl. Units without a token have weight 1.

    Source: per token and per row this is verl 0.9.1 (``rollout_corr_helper.py``: ``rollout_is=token`` and ``sequence``,
    with "low_high" as threshold for MIS). One weight per turn of a row with several turns is ours; on rows of one turn
    it is verl's ``sequence``.

    Args:
        log_ratio: r_t, (B, L) or jagged; only the tokens of units count.
        units: the tokens that share a weight (:func:`units_of`).
        low: lower bound; None: none. Truncation has none.
    """
    of_unit = units.sum(log_ratio.double()) if ratio == "product" else units.mean(log_ratio.double())
    weight = clamp_log_ratio(of_unit).exp()
    inside = (weight <= high) & (weight >= (low or 0.0))
    if outside == "truncate":
        return weight.clamp(max=high), inside
    return torch.where(inside, weight, 0.0), inside


MAX_MEAN_LOG_RATIO = 10.0


def accumulated_ratio(
    ratio: Tensor,
    log_prob_before: Tensor,
    log_prob_after: Tensor,
    response_mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """The ratio (B,) for the turn before, once a turn has been updated: Eq 8 with the sequence ratio of that turn.

    ``log_prob_before`` and ``log_prob_after`` (B, L) are those of the turn's tokens under the policy before and after
    its update. The turn's ratio, the exp of its mean log-ratio, is clipped to [1 - clip_low, 1 + clip_high], and so is
    the product with ``ratio`` (B,). A row without tokens keeps its ratio.

    Source: arXiv:2602.06554. In the paper the denominator is the policy at the start of the iteration, in the released
    code, and here, the one before this turn's update. Both clips are the code's.
    """
    mask = response_mask.bool()
    gap = torch.where(mask, log_prob_after.double() - log_prob_before.double(), 0.0)
    mean = gap.sum(1) / mask.sum(1).clamp(min=1)
    low, high = 1 - clip_low, 1 + clip_high
    of_turn = mean.clamp(-MAX_MEAN_LOG_RATIO, MAX_MEAN_LOG_RATIO).exp().clamp(low, high)
    return (ratio.double() * of_turn).clamp(low, high).to(ratio.dtype)
