"""SALT: trajectory advantages, averaged over the trajectories that take the same step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import Norm, group_stats, joint_codes, previous_values
from verl_turnkey.advantage.methods._episode_level import episode_level, leave_one_out
from verl_turnkey.advantage.methods._graph import TERMINAL, next_anchors
from verl_turnkey.advantage.params import Count, Positive, Ranged
from verl_turnkey.advantage.registry import register_estimator


@dataclass(frozen=True)
class SaltParams(Ranged):
    """Parameters of ``salt``. The paper's own settings were not available to us; these are our reading."""

    base: Literal["grpo", "rloo"] = "grpo"  # trajectory advantage: against the group, or against its other members
    average: Literal["occurrences", "trajectories"] = "occurrences"
    """a trajectory counts each time it takes the edge, or once"""
    history: Count = 0  # preceding edges that must agree as well before steps are merged
    norm: Norm = "mean_std"  # grpo: divide by the group's sample std, or only subtract the mean
    epsilon: Positive = 1e-6  # added to the std


@register_estimator(
    "salt",
    params=SaltParams,
    needs=("anchor", "action"),
    paper="SALT, arXiv:2510.20022",
    summary="averages the trajectories' group advantages over all trajectories that take the same step",
)
def salt(batch: StepBatch, params: SaltParams) -> Credit:
    """Trajectory advantages, averaged over each edge of the group's transition graph.

    ::

        A_i  = (R_i - mean_g) / F_g      base="grpo"      or      n/(n-1) (R_i - mean_g)      base="rloo"
        e(t) = (s(t), a(t), s(t+1))      edge of a step, inside its group; one that terminates is another
        A(t) = mean of A_i over the steps on the same edge - penalty(t)

    An edge that one trajectory alone takes keeps that trajectory's A_i. ``average="trajectories"`` averages inside each
    trajectory first, so that cycles add no weight. The next state is ``extra["next_anchor"]`` (None: the end) when
    given, else the state of the trajectory's next step, or the end after the last. A step that terminated its episode
    shares no edge with one that did not, such as the last before a limit. Needs ``anchor`` and ``action``, the parsed
    action; a None among them never matches. Groups of one trajectory, and groups whose scores are all equal, give 0. A
    step's penalty enters no mean.

    Source: arXiv:2510.20022, from a restatement in a competing paper; no code was available to us. Exact equality of
    edges, the average over occurrences and ``history`` are our reading.
    """
    grpo = params.base == "grpo"
    trajectory_credit = episode_level(batch, params.norm, epsilon=params.epsilon) if grpo else leave_one_out(batch)
    edge = batch.anchor  # a None among the columns has a code of its own: its edge matches none
    for column in (batch.action, next_anchors(batch) - TERMINAL, batch.terminated.astype(np.int64)):
        edge, _ = joint_codes(edge, column)
    path, n = joint_codes(batch.group, edge)
    earlier = edge
    for _ in range(params.history):  # one more preceding edge; -1 is the beginning
        earlier = previous_values(earlier, batch.runs, first=-1)
        path, n = joint_codes(path, earlier + 1)

    visit, visits = joint_codes(path, batch.trajectory)
    per_visit = group_stats(trajectory_credit, visit, visits).mean
    visit_path = np.zeros(visits, dtype=np.int64)
    visit_path[visit] = path
    takers = np.bincount(visit_path, minlength=n)
    if params.average == "trajectories":
        mean = group_stats(per_visit, visit_path, n).mean
    else:
        mean = group_stats(trajectory_credit, path, n).mean
    shared = takers[path] >= 2
    advantage = np.where(shared, mean[path], trajectory_credit)
    metrics = {
        "credit/groups": float(batch.n_groups),
        "credit/edges": float(n),
        "credit/share_steps_on_shared_edges": float(shared.mean()) if len(batch) else 0.0,
    }
    return Credit.of_parts(
        {"trajectory_credit": trajectory_credit, "edge_level": advantage - trajectory_credit},
        batch.penalty,
        total=advantage,
        metrics=metrics,
        groups={"trajectory_credit": batch.group, "edge_level": path},
    )
