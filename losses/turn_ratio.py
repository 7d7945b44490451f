"""One importance ratio per turn: ST-PPO's Turn-PPO (geometric) and Turn-PPO (product)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from verl_turnkey.advantage.params import AboveOne, BelowOne, NotNegative, Ranged
from verl_turnkey.losses.clipping import MAX_LOG_RATIO, clamp_log_ratio, ratio_loss, surrogate
from verl_turnkey.losses.registry import LossInputs, TokenLoss, register_loss
from verl_turnkey.losses.turns import TURN, Turns


@dataclass(frozen=True)
class TurnRatioParams(Ranged):
    """Parameters of ``turn_ratio``; the defaults are ST-PPO's."""

    ratio: Literal["geometric", "product"] = "geometric"  # mean of the turn's log-ratios, or their sum
    clip_low: BelowOne = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: NotNegative = 0.2  # see clip_low
    aggregate: Literal["tokens", "turns"] = "tokens"  # mean over tokens, so that long turns weigh more, or over turns
    gradient: Literal["turn", "token"] = "turn"  # through the turn's ratio, or per token with its own advantage
    dual_clip: AboveOne | None = None  # bound of the loss, times the advantage, where that is negative; null: none


def equal_turns(inputs: LossInputs, params: TurnRatioParams) -> Tensor | None:
    """With ``aggregate="turns"`` each turn weighs 1, shared by its tokens."""
    if params.aggregate == "tokens":
        return None
    turns = Turns.of(inputs.mask, inputs.extra.get(TURN))
    return turns.spread(1 / turns.tokens.to(inputs.log_prob.dtype))


@register_loss(
    "turn_ratio",
    params=TurnRatioParams,
    accepts=(TURN,),
    weight=equal_turns,
    paper="ST-PPO, arXiv:2511.20718; Turn-PPO, arXiv:2512.17008",
    summary="PPO's clipped loss with one importance ratio per turn",
)
def turn_ratio(inputs: LossInputs, params: TurnRatioParams) -> TokenLoss:
    """Clipped loss of every token under the ratio of its turn.

    ::

        w_k  = exp( mean over turn k of (log pi - log pi_old) )      ratio="geometric"    (ST-PPO, Eq 4)
        w_k  = exp( sum  over turn k of (log pi - log pi_old) )      ratio="product"      (Turn-PPO)
        loss = mean of -min(w_k A_t, clip(w_k, 1 - clip_low, 1 + clip_high) A_t)

    over the tokens t, or with ``aggregate="turns"`` over tokens inside a turn and then over turns. With
    ``gradient="turn"`` w_k itself is differentiated, so every token of a turn gets the turn's mean advantage. With
    ``gradient="token"`` each token gets its own advantage, as in verl's ``gspo``. The two are the same when the
    advantage is constant in a turn. Log-ratios of turns are cut at +-20.

    Turns are runs of ones in the mask. If tokens were rejected afterwards, ``turn`` (B, L) gives the turn of each token
    (:func:`~verl_turnkey.losses.turns.turn_ids` of the original mask); rejected tokens are left out of their turn's
    ratio.

    Source: arXiv:2511.20718, Eq 4 and Lemma 4.1, from several agreeing restatements; arXiv:2512.17008, where two
    re-implementations agree on the product and differ in the average. On rows of one turn the geometric form is verl's
    ``gspo``. The dual clip is verl's, off by default.
    """
    turns = Turns.of(inputs.mask, inputs.extra.get(TURN))
    log_ratio = inputs.log_prob - inputs.old_log_prob
    per_turn = turns.mean(log_ratio) if params.ratio == "geometric" else turns.sum(log_ratio)
    ratio = turns.spread(clamp_log_ratio(per_turn).exp())
    if params.gradient == "token":
        # d(sum over the turn's tokens of w_k) / d(log pi of one token) is w_k, or tokens * w_k for the product.
        slope = torch.ones_like(per_turn) if params.ratio == "geometric" else turns.tokens.to(per_turn.dtype)
        slope = turns.spread(slope * (per_turn.abs() < MAX_LOG_RATIO))
        ratio = ratio.detach() * (1 + slope * (inputs.log_prob - inputs.log_prob.detach()))
    clip = (params.clip_low, params.clip_high, params.dual_clip)
    loss = surrogate(ratio, inputs.advantages, *clip)
    return ratio_loss(inputs, inputs.weight * loss, ratio, *clip)
