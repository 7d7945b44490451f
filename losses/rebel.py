"""REBEL: regress differences of log-ratios on differences of rewards."""

from __future__ import annotations

from dataclasses import dataclass

from verl_turnkey.advantage.params import Positive, Ranged
from verl_turnkey.losses.registry import LossInputs, TokenLoss, register_loss


@dataclass(frozen=True)
class RebelParams(Ranged):
    """Parameters of ``rebel``; the default is the released code's."""

    eta: Positive = 1.0  # factor of the differences of rewards


@register_loss(
    "rebel",
    params=RebelParams,
    needs={
        "rewards": "one outcome per row",
        "group_log_ratio": "mean of the summed log-ratios over each row's group, under the current policy",
        "group_reward": "mean outcome of each row's group",
    },
    per_row=True,
    paper="REBEL, arXiv:2404.16767",
    summary="regresses differences of log-ratios on differences of rewards within each group",
)
def rebel(inputs: LossInputs, params: RebelParams) -> TokenLoss:
    """``2 ((l_i - mean_g l) - eta (r_i - mean_g r))^2`` per row, averaged over rows; l: summed log-ratio of a row.

    This equals the mean of ``((l_i - l_j) - eta (r_i - r_j))^2`` over all ordered pairs of a group (i = j included), in
    value and in gradient; the group mean of the current l is passed in as a constant. ``rewards``, ``group_log_ratio``
    and ``group_reward`` are (B,); ``advantages`` are not used. Source: arXiv:2404.16767; as in its code eta multiplies
    the rewards.
    """
    rows = inputs.mask.any(1)
    log_ratio = (inputs.log_prob - inputs.old_log_prob).sum(1)
    rewards, mean_reward = inputs.extra["rewards"], inputs.extra["group_reward"]
    gap = (log_ratio - inputs.extra["group_log_ratio"]) - params.eta * (rewards - mean_reward)
    loss = (2 * gap**2)[:, None] * inputs.mask
    metrics = {"regression_error": (gap[rows] ** 2).mean().item() if rows.any() else 0.0}
    return TokenLoss(loss, metrics)
