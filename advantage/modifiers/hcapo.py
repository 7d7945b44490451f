"""HCAPO: turns that are likely in hindsight, with a successful outcome in the prompt, share more of the return."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import compared, distances, group_stats, next_values
from verl_turnkey.advantage.methods._episode_level import solved_trajectories
from verl_turnkey.advantage.methods._step_columns import step_column
from verl_turnkey.advantage.modifying import Estimate, register_modifier
from verl_turnkey.advantage.params import BelowOne, Finite, NotNegative, Positive, Ranged, Unit


@dataclass(frozen=True)
class HcapoParams(Ranged):
    """Parameters of ``hcapo``; the defaults are the paper's."""

    weight: NotNegative = 1.0  # of the hindsight term; the paper's omega
    gamma: Unit = 0.95  # discount of the outcome, per turn from the end
    temperature: Positive = 5.0  # divides the mean log-probability of a turn in hindsight
    clip: BelowOne = 0.2  # a turn's ratio is clipped to [1 - clip, 1 + clip]
    smooth: bool = False  # average the value of a turn with that of the next
    success: Finite | None = None
    """the turns of a success get no negative term. A return above this number is one; null: the column success, or,
    without one, a return above 0"""


@register_modifier(
    "hcapo",
    params=HcapoParams,
    needs=("extra.teacher_log_prob_mean",),
    paper="HCAPO, arXiv:2603.08754",
    summary="adds the outcome's share of each turn, by how likely the turn is with a successful outcome in the prompt",
)
def hcapo(batch: StepBatch, params: HcapoParams, estimate: Estimate) -> Credit:
    """``A_t + weight C_t`` for the turns t of a trajectory of T turns, with score R.

    ::

        h_t   = exp(extra.teacher_log_prob_mean / temperature)
        rho_t = clip(h_t / (mean of h over the trajectory), 1 - clip, 1 + clip)
        Q_t   = rho_t gamma^(T - 1 - t) R                     with smooth: 0.5 Q_t + 0.5 Q_{t+1}
        C_t   = (Q_t - mean Q) / (std Q + 1e-6)               over all turns of the group; in a success at least 0

    A turn without a text has rho = 1, and takes no part in the mean of h. The credit is never that of the method alone:
    with equal h the term is a discounted return.

    Source: the equations of arXiv:2603.08754 as a third party copied them (RainyFields/Agentic-RL-CA); no code of the
    authors. The sample std and its epsilon are our reading, and so is that the last turn keeps its Q under ``smooth``.
    """
    credit = estimate(batch)
    log_prob = step_column(batch, "hcapo", "teacher_log_prob_mean", gaps=True)
    has_text = ~np.isnan(log_prob)
    largest = np.full(batch.n_trajectories, -np.inf)
    np.maximum.at(largest, batch.trajectory[has_text], log_prob[has_text])
    # In proportion to the likeliest turn of the trajectory: exp of a log-probability alone may round to 0.
    h = np.exp(np.where(has_text, log_prob - largest[batch.trajectory], 0.0) / params.temperature)
    average = group_stats(h, batch.trajectory, batch.n_trajectories, weights=has_text.astype(np.int64)).mean
    ratio = np.divide(h, average[batch.trajectory], out=np.ones_like(h), where=has_text)
    rho = np.clip(ratio, 1 - params.clip, 1 + params.clip)
    left = distances(batch.runs)
    score = batch.score[batch.first_rows][batch.trajectory]
    q = rho * params.gamma**left * score
    if params.smooth:
        q = 0.5 * q + 0.5 * next_values(q, batch.runs, q)
    term = compared(q, batch.group, batch.n_groups)
    solved = solved_trajectories(batch, params.success)[batch.trajectory]
    term = np.where(solved, np.maximum(term, 0.0), term)
    levels = {"hindsight_ratio": rho, "hindsight_value": q}
    return replace(credit, advantage=credit.advantage + params.weight * term, levels=levels)
