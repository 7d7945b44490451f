"""HDPO: a second term for tool efficiency, over the rollouts with a tool advantage."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from verl_turnkey.advantage.params import AboveOne, BelowOne, NotNegative, Ranged
from verl_turnkey.losses.clipping import clamp_log_ratio, ratio_loss, surrogate
from verl_turnkey.losses.registry import LossInputs, TokenLoss, register_loss


@dataclass(frozen=True)
class HdpoParams(Ranged):
    """Parameters of ``hdpo``; the defaults are the released code's."""

    accuracy_w: NotNegative = 1.0  # weight of the term with the usual advantages
    tool_w: NotNegative = 0.15  # weight of the term with the tool advantages
    clip_low: BelowOne = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: NotNegative = 0.2  # see clip_low
    dual_clip: AboveOne | None = 3.0  # bound of each term, times its advantage, where that is negative; null: none


def with_signal(inputs: LossInputs, params: HdpoParams) -> Tensor:
    """The tokens of the rows with a tool advantage other than 0."""
    return inputs.mask & (inputs.extra["tool_advantages"] != 0).any(1, keepdim=True)


@register_loss(
    "hdpo",
    params=HdpoParams,
    needs={"tool_advantages": "an estimator that gives two advantages, one of them for tool efficiency"},
    weight=with_signal,
    paper="HDPO (Metis), arXiv:2604.08545",
    summary="PPO's clipped loss plus a term for tool efficiency, averaged over the rollouts with a tool advantage",
)
def hdpo(inputs: LossInputs, params: HdpoParams) -> TokenLoss:
    """``accuracy_w L(A) + tool_w L(A_tool)``, each a token mean of PPO's clipped loss.

    The mean of the second term is over the rows with a ``tool_advantages`` (B, L) other than 0. Source:
    arXiv:2604.08545 and its code, where both terms go through verl's vanilla loss and so have its dual clip.
    """
    ratio = clamp_log_ratio(inputs.log_prob - inputs.old_log_prob).exp()
    clip = (params.clip_low, params.clip_high, params.dual_clip)
    accuracy = surrogate(ratio, inputs.advantages, *clip)
    tool = surrogate(ratio, inputs.extra["tool_advantages"], *clip)
    loss = params.accuracy_w * accuracy + params.tool_w * inputs.weight * tool
    rows = (inputs.weight > 0).any(1).float().mean().item()
    term = ratio_loss(inputs, loss, ratio, *clip)
    term.metrics["share_of_rows_with_tool_signal"] = rows
    return term
