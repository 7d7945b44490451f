"""ST-PPO and S-PPO: the gradient of the clipped loss, divided by the norm of the gradient that clipping removed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from verl_turnkey.advantage.params import BelowOne, NotNegative, Ranged
from verl_turnkey.losses.clipping import clamp_log_ratio, clipped, ratio_loss, surrogate
from verl_turnkey.losses.registry import LossInputs, TokenLoss, register_loss
from verl_turnkey.losses.turns import TURN, Turns


@dataclass(frozen=True)
class StPpoParams(Ranged):
    """Parameters of ``st_ppo`` and ``s_ppo``."""

    clip_low: BelowOne = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: NotNegative = 0.2  # see clip_low
    divide: Literal["above_one", "always"] = "above_one"
    """gradient / max(1, norm of the clipping bias) (our reading), or / norm whenever a token was clipped"""

    def gradient_scale(self, norm: float) -> float:
        """Factor of the gradient, given the norm of the clipping bias; 1 when nothing was clipped.

        A norm that is not finite gives nan, so that the trainer skips the step.
        """
        if norm == 0:
            return 1.0
        if not math.isfinite(norm):
            return math.nan
        return 1.0 / (max(1.0, norm) if self.divide == "above_one" else norm)


@register_loss(
    "st_ppo",
    params=StPpoParams,
    accepts=(TURN,),
    paper="ST-PPO, arXiv:2511.20718",
    summary="one importance ratio per turn; divides the gradient by the norm of its clipping bias",
)
def st_ppo(inputs: LossInputs, params: StPpoParams) -> TokenLoss:
    """The geometric ``turn_ratio`` loss, with the clipping bias of the turn ratios.

    ::

        w_k = exp( mean over turn k of (log pi - log pi_old) )                                  (Eq 4)
        g   = gradient of the mean over tokens of min(w_k A_t, clip(w_k) A_t)
        C   = gradient of the mean over tokens of w_k A_t, of clipped tokens only               (Lemma 4.2)
        update with g / max(1, ||C||)                                                           (Eq 7/8, our reading)

    A token is clipped when the minimum is the constant side. The gradient without clipping is g + C: the more clipping
    distorts the update, the smaller the update becomes. With a group estimator instead of a critic this is the paper's
    second form (SO-GRPO). There is no dual clip: it would clip a second side, which the paper's C does not contain.

    Source: arXiv:2511.20718, from its abstracts, a review and restatements; neither the printed Eq 7/8 nor code was
    available to us. ``divide="always"`` is the plain division, which enlarges the gradient when ||C|| < 1. The norm is
    over all parameters and the whole mini-batch; the whole gradient of the actor's loss is divided, KL and entropy
    terms included. Called as a function, ``st_ppo`` returns the loss without this division. ``turn``: as in
    :func:`~verl_turnkey.losses.turn_ratio.turn_ratio`.
    """
    turns = Turns.of(inputs.mask, inputs.extra.get(TURN))
    log_ratio = turns.spread(clamp_log_ratio(turns.mean(inputs.log_prob - inputs.old_log_prob)))
    return _with_bias(inputs, log_ratio.exp(), params)


@register_loss(
    "s_ppo",
    params=StPpoParams,
    paper="S-PPO (ST-PPO), arXiv:2511.20718",
    summary="one importance ratio per token; divides the gradient by the norm of its clipping bias",
)
def s_ppo(inputs: LossInputs, params: StPpoParams) -> TokenLoss:
    """As :func:`st_ppo`, with PPO's ratio of each token."""
    return _with_bias(inputs, clamp_log_ratio(inputs.log_prob - inputs.old_log_prob).exp(), params)


def _with_bias(inputs: LossInputs, ratio: Tensor, params: StPpoParams) -> TokenLoss:
    where = clipped(ratio, inputs.advantages, params.clip_low, params.clip_high) & inputs.mask
    bias = torch.where(where, ratio * inputs.advantages, 0.0)
    loss = surrogate(ratio, inputs.advantages, params.clip_low, params.clip_high)
    return ratio_loss(inputs, loss, ratio, params.clip_low, params.clip_high, bias=bias)
