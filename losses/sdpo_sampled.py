"""SDPO on the sampled tokens: the policy moves to a teacher that has seen a successful answer or feedback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from verl_turnkey.advantage.params import AboveOne, BelowOne, NotNegative, Positive, Ranged, Unit
from verl_turnkey.losses.clipping import clamp_log_ratio, ratio_loss, surrogate
from verl_turnkey.losses.registry import TEACHER, LossInputs, TokenLoss, register_loss


@dataclass(frozen=True)
class SdpoSampledParams(Ranged):
    """Parameters of ``sdpo_sampled``; the defaults are TRL's and the released code's."""

    weight: Unit = 1.0  # of the distillation; the rest, 1 - weight, is PPO's loss
    is_clip: Positive = 2.0  # bound of the importance weight from the old to the current policy
    rows: Literal["with_text", "all"] = "with_text"
    """what the distillation is a mean over: the rows with a text, as in the released code, or all, as in TRL"""
    clip_low: BelowOne = 0.2  # of PPO's loss: the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: NotNegative = 0.2  # see clip_low
    dual_clip: AboveOne | None = 3.0  # bound of PPO's loss, times its advantage, where that is negative; null: none


def with_text(inputs: LossInputs, params: SdpoSampledParams) -> Tensor | None:
    """The tokens of rows with a text; None: a mean over all."""
    return inputs.extra["has_teacher"] * inputs.mask if params.rows == "with_text" else None


@register_loss(
    "sdpo_sampled",
    params=SdpoSampledParams,
    needs=TEACHER,
    weight=with_text,
    paper="SDPO, arXiv:2601.20802",
    summary="distils a teacher with an answer or feedback in its prompt into the policy, on the sampled tokens",
)
def sdpo_sampled(inputs: LossInputs, params: SdpoSampledParams) -> TokenLoss:
    """``(1 - weight) L_PPO + weight min(exp(lp - lo), is_clip) (lp - lt) lp`` per token; gradient through the last lp.

    lp is the current policy's log-probability, lo the old one's, lt the teacher's. That is the reverse KL divergence on
    the sampled token. Without a text a row has no second term; with weight 1 and no text at all there is no gradient.

    Source: arXiv:2601.20802 and its code (lasgroup/SDPO at 0e6d510) in the form without logits (``alpha`` 1), and TRL
    1.16, which has the weight. Both have a teacher by a moving average of the weights, this by the old weights; their
    form over the largest 100 logits of both prompts is not here.
    """
    log_ratio = inputs.log_prob - inputs.old_log_prob
    ratio = clamp_log_ratio(log_ratio).exp()
    clip = (params.clip_low, params.clip_high, params.dual_clip)
    importance = ratio.detach().clamp(max=params.is_clip)
    pull = (inputs.log_prob - inputs.extra["teacher_log_prob"]).detach()
    distillation = inputs.extra["has_teacher"] * inputs.weight * importance * pull * inputs.log_prob
    loss = (1 - params.weight) * surrogate(ratio, inputs.advantages, *clip) + params.weight * distillation
    term = ratio_loss(inputs, loss, ratio, *clip)
    number = inputs.extra["has_teacher"].sum()
    term.metrics["teacher/gap"] = (-(pull * inputs.extra["has_teacher"]).sum() / number.clamp(min=1)).item()
    return term
