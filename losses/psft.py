"""PSFT: supervised fine-tuning with PPO's clipped loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from verl_turnkey.advantage.params import BelowOne, NotNegative, Ranged
from verl_turnkey.losses.clipping import clamp_log_ratio, ratio_loss, surrogate
from verl_turnkey.losses.registry import LossInputs, TokenLoss, register_loss


@dataclass(frozen=True)
class PsftParams(Ranged):
    """Parameters of ``psft``; the defaults are the released code's."""

    clip_low: BelowOne = 0.2  # has no effect on value or gradient: the advantage is never negative
    clip_high: NotNegative = 0.28  # a token whose ratio exceeds 1 + clip_high has no gradient


@register_loss(
    "psft",
    params=PsftParams,
    paper="PSFT, arXiv:2508.17784",
    summary="supervised fine-tuning with PPO's clip: every token has advantage 1",
)
def psft(inputs: LossInputs, params: PsftParams) -> TokenLoss:
    """``-min(rho_t, clip(rho_t))`` per token: the clipped loss with A = 1; ``advantages`` are ignored.

    ``old_log_prob`` is the policy's at the start of the batch. Source: arXiv:2508.17784 and its code.
    """
    inputs = replace(inputs, advantages=torch.ones_like(inputs.advantages))
    ratio = clamp_log_ratio(inputs.log_prob - inputs.old_log_prob).exp()
    loss = surrogate(ratio, inputs.advantages, params.clip_low, params.clip_high)
    return ratio_loss(inputs, loss, ratio, params.clip_low, params.clip_high)
