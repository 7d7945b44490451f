"""iStar: a preference of each successful trajectory of a group over each unsuccessful one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl_turnkey.advantage import StepBatch
from verl_turnkey.learned.registry import ObjectiveParams, register_objective
from verl_turnkey.learned.trajectories import Trajectories


@register_objective(
    "preference",
    reads=("beta", "over", "weigh", "positive"),
    paper="iStar / OPRL, arXiv:2509.19199",
    summary="prefers each successful trajectory of a group over each unsuccessful one",
)
def preference(q: Tensor, table: StepBatch, params: ObjectiveParams) -> tuple[Tensor, dict[str, float]] | None:
    """Trajectory DPO on one number per step.

    ::

        Q(i) = beta sum_k q(i,k)                                q: sum of log pi_phi - log pi_old over a turn's tokens
        F    = - mean over pairs of log sigmoid(Q(w) - Q(l))    w: success, l: none, of the same group

    ``over="mean"`` takes the mean over k. With ``weigh="group"`` the mean is over the pairs of a group, then over the
    groups that have any; else groups weigh by their number of pairs. The derivatives by a group's Q sum to 0.

    Metrics: ``pairs``, and ``pair_accuracy``, the share of pairs with Q(w) > Q(l). None without a pair.

    Source: arXiv:2509.19199. The released code (Qwen-Character/CharacterRL-iStar at 1de87a22) has the mean over the
    steps, pairs only rows of one data-parallel rank, and detaches Q: its update has no gradient.
    """
    of = Trajectories.of(q, table, params)
    pair = (of.group[:, None] == of.group) & of.positive[:, None] & ~of.positive
    good, bad = pair.nonzero(as_tuple=True)
    if not len(good):
        return None
    gap = of.value[good] - of.value[bad]
    weight = torch.full_like(gap, 1 / len(gap))
    if params.weigh == "group":
        pairs_of_group = torch.bincount(of.group[good])
        weight = 1 / ((pairs_of_group > 0).sum() * pairs_of_group[of.group[good]]).to(gap)
    metrics = {"pairs": float(len(gap)), "pair_accuracy": (gap > 0).double().mean().item()}
    return -(weight * logsigmoid(gap)).sum(), metrics
