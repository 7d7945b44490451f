"""DGPO: tokens outside the clip range keep a gradient that decays with a power of the ratio."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from verl_turnkey.advantage.params import BelowOne, NotNegative, Positive, Range, Ranged
from verl_turnkey.losses.clipping import clamp_log_ratio, ratio_loss
from verl_turnkey.losses.registry import LossInputs, TokenLoss, register_loss

Root = Annotated[float, Range(lambda x: 1 <= x < math.inf, "a finite number >= 1")]


@dataclass(frozen=True)
class DgpoParams(Ranged):
    """Parameters of ``dgpo``; the defaults are the released code's for 7B models (n = 2 for 1.5B)."""

    clip_low: BelowOne = 0.2  # L = 1 - clip_low: below it the gradient decays where the advantage is negative
    clip_high: NotNegative = 0.2  # U = 1 + clip_high: above it the gradient grows more slowly, advantage positive
    n: Positive = 1.0  # power of the decay below L: the weight is ratio^(n+1) / L^n
    m: Root = 2.0  # root of the growth above U: the weight is ratio^(1-1/m) U^(1/m)


@register_loss(
    "dgpo",
    params=DgpoParams,
    paper="DGPO (2026)",
    summary="soft clipping: outside the clip range a token's gradient decays instead of vanishing",
)
def dgpo(inputs: LossInputs, params: DgpoParams) -> TokenLoss:
    """``-s_t A_t`` per token, with a surrogate ratio s whose gradient is ``weight * grad log pi``.

    ::

        rho < L and A < 0     weight rho^(n+1) / L^n             goes to 0 with the ratio
        rho > U and A > 0     weight rho^(1 - 1/m) U^(1/m)
        otherwise             weight rho                          L = 1 - clip_low, U = 1 + clip_high

    Value and gradient are continuous at L and U. Log-ratios are cut at +-20; there is no dual clip.

    Source: released code (DGPO-RL, 2026).
    """
    log_ratio = clamp_log_ratio(inputs.log_prob - inputs.old_log_prob)
    constant = log_ratio.detach()
    low, high = 1 - params.clip_low, 1 + params.clip_high
    # Outside the range a term without gradient reduces the log-ratio.
    below, above = params.n * (constant - math.log(low)), (math.log(high) - constant) / params.m
    bend = torch.where(inputs.advantages < 0, below, above).clamp(max=0)
    surrogate = (log_ratio + bend).exp()
    loss = -surrogate * inputs.advantages
    return ratio_loss(inputs, loss, log_ratio.exp(), params.clip_low, params.clip_high)
