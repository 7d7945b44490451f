"""SDAR: PPO's loss plus a term that raises what a teacher with a skill in its prompt finds likelier."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_turnkey.advantage.params import AboveOne, BelowOne, NotNegative, Ranged
from verl_turnkey.losses.clipping import clamp_log_ratio, ratio_loss, surrogate
from verl_turnkey.losses.registry import TEACHER, LossInputs, TokenLoss, register_loss


@dataclass(frozen=True)
class SdarParams(Ranged):
    """Parameters of ``sdar``; the defaults are the released scripts'."""

    coefficient: NotNegative = 0.01  # of the term; 0.1 in the released code
    beta: NotNegative = 5.0  # steepness of the gate; 0: all tokens alike (GRPO+OPSD of the paper)
    pg_weight: NotNegative = 1.0  # of PPO's loss; 0: the term alone (OPSD of the paper)
    clip_low: BelowOne = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: NotNegative = 0.2  # see clip_low
    dual_clip: AboveOne | None = 3.0  # bound of PPO's loss, times its advantage, where that is negative; null: none


@register_loss(
    "sdar",
    params=SdarParams,
    needs=TEACHER,
    paper="SDAR, arXiv:2605.15155",
    summary="PPO's clipped loss plus a gated term that raises the tokens which a teacher with a skill finds likelier",
)
def sdar(inputs: LossInputs, params: SdarParams) -> TokenLoss:
    """``pg_weight L_PPO + coefficient g_t (lt - lp)`` per token, with ``g_t = sigmoid(beta (lt - lp))``, no gradient.

    lp is the current policy's log-probability, lt the teacher's by the old weights. The gradient of the term is
    ``-coefficient g_t``: it raises every token, those most that the teacher prefers, whatever the advantage. Rows
    without a text have no term.

    Source: arXiv:2605.15155 and its code (ZJU-REAL/SDAR at 8b85c23, ``sdar_utils.py``), whose numbers this has. There
    every row has a text. The coefficient is 0.1 in the code and 0.01 in all scripts, the default here.
    """
    ratio = clamp_log_ratio(inputs.log_prob - inputs.old_log_prob).exp()
    clip = (params.clip_low, params.clip_high, params.dual_clip)
    gap = inputs.extra["teacher_log_prob"] - inputs.log_prob
    gate = torch.sigmoid(params.beta * gap.detach())
    with_text = inputs.extra["has_teacher"]
    loss = params.pg_weight * surrogate(ratio, inputs.advantages, *clip) + params.coefficient * with_text * gate * gap
    term = ratio_loss(inputs, loss, ratio, *clip)
    term.metrics["teacher/gate"] = ((gate * with_text).sum() / with_text.sum().clamp(min=1)).item()
    return term
