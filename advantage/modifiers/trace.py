"""TRACE: turns that make the gold answer likelier are credited for the next few gains."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import distances, group_stats, next_values
from verl_turnkey.advantage.methods._step_columns import step_column
from verl_turnkey.advantage.modifying import Estimate, register_modifier
from verl_turnkey.advantage.params import AtLeastOne, NotNegative, Positive, Ranged, Unit

_LEAST = np.finfo(np.float64).tiny  # a probability that is rounded to 0 has this one's logarithm


@dataclass(frozen=True)
class TraceParams(Ranged):
    """Parameters of ``trace``; the defaults are the paper's."""

    weight: NotNegative = 0.2  # of a turn's gains, beside the outcome with weight 1
    horizon: AtLeastOne = 3  # gains that count for a turn: its own and those of the next horizon - 1 turns
    gamma: Unit = 0.8  # discount of later gains and of the outcome, per turn
    outcome: NotNegative = 2.0  # of the discounted outcome, for turns whose horizon reaches the answer
    offset: Positive = 0.1  # added to the distance from certainty, which bounds the gains near it


@register_modifier(
    "trace",
    params=TraceParams,
    needs=("extra.gold_probability",),
    before=("extra.gold_probability",),
    paper="TRACE, arXiv:2607.13988",
    summary="adds to each turn before the answer how much it and the next turns close in on the gold answer",
)
def trace(batch: StepBatch, params: TraceParams, estimate: Estimate) -> Credit:
    """``A_k + weight c_k`` for the turns k = 0, .., n - 1 before the last one, which gives the answer and keeps A.

    ::

        d_k   = offset - log extra.gold_probability       before turn k
        del_k = log(d_k / d_{k+1})
        c_k   = (sum of gamma^j del_{k+j} over j < horizon, k + j < n) / (sum of gamma^j over the same j)
                + outcome gamma^(n - k) A_n               where k + horizon >= n

    ``A`` is the credit of the method, ``A_n`` that of the last turn.

    Source: the equations of arXiv:2607.13988 as a public verl fork follows them; no code of the authors. There the
    probability is that of a frozen reference, and A the outcome over its standard deviation in the group, which is
    ``grpo_steps`` except for the kind of standard deviation. ``probe_gold`` asks the policy itself.
    """
    credit = estimate(batch)
    probability = step_column(batch, "trace", "gold_probability", 0.0, 1.0)
    left = distances(batch.runs)  # n - k, 0 for the answer
    distance = np.log(params.offset - np.log(np.maximum(probability, _LEAST)))
    gain = np.where(left > 0, distance - next_values(distance, batch.runs, 0.0), 0.0)
    total, weight = np.zeros_like(gain), np.zeros_like(gain)
    later, exists = gain, (left > 0).astype(np.float64)
    for j in range(min(params.horizon, int(batch.runs.lengths.max(initial=1)))):
        total, weight = total + params.gamma**j * later, weight + params.gamma**j * exists
        later, exists = next_values(later, batch.runs, 0.0), next_values(exists, batch.runs, 0.0)
    ends = batch.runs.ends
    answer = group_stats(credit.advantage[ends], batch.trajectory[ends], batch.n_trajectories).mean[batch.trajectory]
    end = np.where(left <= params.horizon, params.outcome * params.gamma**left * answer, 0.0)
    term = np.where(left > 0, total / np.maximum(weight, 1.0) + end, 0.0)
    return replace(credit, advantage=credit.advantage + params.weight * term, levels={"gain": gain, "term": term})
