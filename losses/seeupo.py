"""SeeUPO's bookkeeping: turns are updated one after the other, and each update is weighed by what the last one did.

Two functions for a training loop that goes through the turns in reverse order; the loss itself is a sequence ratio with
PPO's clip (``turn_ratio`` on rows of one turn, verl's ``gspo``).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 10.0
SMALLEST_STD = 1e-6


def turn_advantages(score: Tensor, group: Tensor, ratio: Tensor, clamp: float = 3.0) -> Tensor:
    """``M_{t+1}``: the advantages (B,) that turn t is updated with, one row per trajectory.

    ::

        A = score - mean of the group           a group of one keeps its score
        A = (A - mean) / std of all rows        sample std; only centred when it is 0
        M = clip(A, -clamp, clamp) * ratio

    ``group`` (B,) are integer codes, ``ratio`` (B,) what :func:`accumulated_ratio` made of the turns after t, ones at
    first. A batch whose groups are constant gives exactly 0.

    Source: SeeUPO, arXiv:2602.06554, Eq 9 and 8; the clamp, the order of the two normalisations and the group of one
    are the released code's.
    """
    values = score.double()
    n = int(group.max()) + 1 if len(group) else 0
    size = torch.bincount(group, minlength=n)
    mean = values.new_zeros(n).index_add(0, group, values) / size.clamp(min=1)
    low = values.new_full((n,), torch.inf).scatter_reduce(0, group, values, "amin")
    high = values.new_full((n,), -torch.inf).scatter_reduce(0, group, values, "amax")
    mean = torch.where(low == high, low, mean)  # the rounding of a mean is no advantage
    centred = torch.where(size[group] > 1, values - mean[group], values)
    if len(centred) > 1:
        std = centred.std()
        centred = centred - centred.mean()
        if std > SMALLEST_STD:
            centred = centred / std
    return (centred.clamp(-clamp, clamp) * ratio.double()).to(ratio.dtype)


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
