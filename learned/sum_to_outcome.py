"""SPA-RL: contributions of steps that add up to the outcome of their trajectory."""

from __future__ import annotations

from torch import Tensor

from verl_turnkey.advantage import StepBatch
from verl_turnkey.learned.registry import ObjectiveParams, register_objective
from verl_turnkey.learned.trajectories import Trajectories


@register_objective(
    "sum_to_outcome",
    kinds=("head",),
    paper="SPA-RL, arXiv:2505.20732",
    summary="regresses the sum of a trajectory's step scores on its outcome",
)
def sum_to_outcome(q: Tensor, table: StepBatch, params: ObjectiveParams) -> tuple[Tensor, dict[str, float]] | None:
    """``F = mean over trajectories of (sum_k q(i,k) - R(i))^2``; R: the trajectory's score.

    Metric: ``error``, the mean absolute difference. Source: arXiv:2505.20732, where q is a linear map of the last
    hidden state of each turn.
    """
    of = Trajectories.of(q, table, ObjectiveParams(beta=1.0))
    error = of.value - of.outcome
    return (error**2).mean(), {"error": error.detach().abs().mean().item()}
