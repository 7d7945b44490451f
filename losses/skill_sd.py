"""Skill-SD: PPO's loss plus a weighted KL divergence to a teacher with a skill in its prompt."""

from __future__ import annotations

from dataclasses import dataclass

from verl_turnkey.advantage.params import AboveOne, BelowOne, NotNegative, Ranged
from verl_turnkey.losses.clipping import MAX_LOG_RATIO, clamp_log_ratio, ratio_loss, surrogate
from verl_turnkey.losses.registry import TEACHER, LossInputs, TokenLoss, register_loss

#: The log-ratio of the term's importance weight is clamped to it from above, as in the released code.
MAX_WEIGHT = 10.0


@dataclass(frozen=True)
class SkillSdParams(Ranged):
    """Parameters of ``skill_sd``; the default of ``lam`` is the released scripts'."""

    lam: NotNegative = 0.001  # of the term; 0.1 in the released code
    clip_low: BelowOne = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: NotNegative = 0.2  # see clip_low
    dual_clip: AboveOne | None = 3.0  # bound of PPO's loss, times its advantage, where that is negative; null: none


@register_loss(
    "skill_sd",
    params=SkillSdParams,
    needs=TEACHER,
    paper="Skill-SD, arXiv:2604.10674",
    summary="PPO's clipped loss plus an importance-weighted KL estimate to a teacher with a skill in its prompt",
)
def skill_sd(inputs: LossInputs, params: SkillSdParams) -> TokenLoss:
    """``L_PPO + lam rho_t k3_t`` per token.

    ::

        k3  = exp(min(lt - lp, 20)) - 1 - (lt - lp)         lp: current policy, lt: teacher, by the old weights
        rho = exp(min(lp - lo, 10))                         with its gradient; lo: old policy

    The gradient of the term is ``lam rho (lp - lt)``: it lowers tokens that the policy likes more than the teacher.
    Rows without a text have no term.

    Source: arXiv:2604.10674 and its code (ZJU-REAL/SDAR at 8b85c23, ``skillsd_utils.py``), whose numbers this has. The
    code logs a linear decay of lam, and its actor reads the constant: there is none here. lam is 0.1 in the code and
    0.001 in the scripts, the default here.
    """
    log_ratio = inputs.log_prob - inputs.old_log_prob
    ratio = clamp_log_ratio(log_ratio).exp()
    clip = (params.clip_low, params.clip_high, params.dual_clip)
    gap = inputs.extra["teacher_log_prob"] - inputs.log_prob
    k3 = gap.clamp(max=MAX_LOG_RATIO).exp() - 1 - gap
    with_text = inputs.extra["has_teacher"]
    divergence = with_text * log_ratio.clamp(max=MAX_WEIGHT).exp() * k3
    loss = surrogate(ratio, inputs.advantages, *clip) + params.lam * divergence
    term = ratio_loss(inputs, loss, ratio, *clip)
    term.metrics["teacher/k3"] = (divergence.detach().sum() / with_text.sum().clamp(min=1)).item()
    return term
