"""Cross entropy of each trajectory's outcome, the objective of implicit process rewards."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from verl_turnkey.advantage import StepBatch
from verl_turnkey.learned.registry import ObjectiveParams, register_objective
from verl_turnkey.learned.trajectories import Trajectories


@register_objective(
    "outcome_ce",
    reads=("beta", "over", "positive"),
    paper="PRIME, arXiv:2502.01456",
    summary="predicts each trajectory's success from the sum over its steps",
)
def outcome_ce(q: Tensor, table: StepBatch, params: ObjectiveParams) -> tuple[Tensor, dict[str, float]] | None:
    """``F = mean over trajectories of CE(sigmoid(Q(i)), success(i))``, ``Q(i) = beta sum_k q(i,k)``.

    ``over="mean"`` takes the mean over k. Metric: ``accuracy``, the share of trajectories with Q > 0 exactly where they
    succeed. Source: arXiv:2502.01456, whose responses have one turn; iStar's released baseline ``ce`` takes each row
    for a trajectory.
    """
    of = Trajectories.of(q, table, params)
    right = ((of.value > 0) == of.positive).double().mean().item()
    return binary_cross_entropy_with_logits(of.value, of.positive.to(of.value)), {"accuracy": right}
