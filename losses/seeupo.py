"""SeeUPO's accumulated ratio: each turn's update is weighted by the importance ratios of the turns updated before it.

For a training loop that goes through the turns in reverse order: the advantages are the estimator ``seeupo``'s, the
loss a sequence ratio with PPO's clip (``turn_ratio`` on rows of one turn, verl's ``gspo``).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 10.0


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
    of_turn = mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp().clamp(low, high)
    return (ratio.double() * of_turn).clamp(low, high).to(ratio.dtype)
