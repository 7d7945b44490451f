"""SPO's probability mask: only tokens whose old probability is below a threshold are trained."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from verl_turnkey.advantage.params import BelowOne, NotNegative, PositiveUnit, Ranged
from verl_turnkey.losses.clipping import clamp_log_ratio, ratio_loss, surrogate
from verl_turnkey.losses.registry import LossInputs, TokenLoss, register_loss


@dataclass(frozen=True)
class SegmentMaskParams(Ranged):
    """Parameters of ``segment_mask``; the threshold is the paper's."""

    threshold: PositiveUnit = 0.9  # tokens with at least this old probability are excluded
    clip_low: BelowOne = 0.2  # the ratio is clipped to [1 - clip_low, 1 + clip_high]
    clip_high: NotNegative = 0.2  # see clip_low
    drop_zeros: bool = False  # tokens with an advantage of 0 are excluded as well, as SPO drops such edges of a tree


def trained(inputs: LossInputs, params: SegmentMaskParams) -> Tensor:
    """The tokens with an old probability below the threshold, and a credit where ``drop_zeros`` asks for one."""
    unsure = inputs.mask & (inputs.old_log_prob.exp() < params.threshold)
    return unsure & (inputs.advantages != 0) if params.drop_zeros else unsure


@register_loss(
    "segment_mask",
    params=SegmentMaskParams,
    weight=trained,
    paper="SPO, arXiv:2505.23564",
    summary="PPO's clipped loss over the tokens whose old probability is below a threshold",
)
def segment_mask(inputs: LossInputs, params: SegmentMaskParams) -> TokenLoss:
    """Token PPO, averaged over the tokens with ``pi_old < threshold`` (:func:`trained`); so are the metrics.

    Source: arXiv:2505.23564 and its code, where segments begin at such tokens, and the credit between them is
    assigned to them alone. Its tree trains on the edges that change the value: ``drop_zeros``, with ``threshold=1``
    where the probability is not to count.
    """
    ratio = clamp_log_ratio(inputs.log_prob - inputs.old_log_prob).exp()
    loss = surrogate(ratio, inputs.advantages, params.clip_low, params.clip_high)
    kept = trained(inputs, params)
    seen = replace(inputs, mask=kept)
    term = ratio_loss(seen, inputs.weight * loss, ratio, params.clip_low, params.clip_high)
    term.metrics["share_of_tokens_trained"] = (kept.sum() / inputs.mask.sum().clamp(min=1)).item()
    return term
