"""L-GRPO's condition on any method: credit for short rollouts, in groups alone whose rollouts are all solved."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.group_ops import mean, run_sums
from verl_turnkey.advantage.methods._episode_level import among_solved, solved_trajectories
from verl_turnkey.advantage.modifying import Estimate, register_modifier
from verl_turnkey.advantage.params import NotNegative, Ranged


@dataclass(frozen=True)
class LengthGateParams(Ranged):
    weight: NotNegative = 0.1  # of the length term


@register_modifier(
    "length_gate",
    params=LengthGateParams,
    needs=("success", "tokens"),
    paper="ConciseR, arXiv:2505.21178",
    summary="adds credit for short rollouts in groups whose rollouts are all solved",
)
def length_gate(batch: StepBatch, params: LengthGateParams, estimate: Estimate) -> Credit:
    """``A + weight (mean l - l_i) / (std l + 1e-6)`` where every trajectory of the group is solved, else ``A``.

    l is the number of tokens of the trajectory, std the sample one.

    Source: arXiv:2505.21178 for the condition alone. Its length term was not found, nor its code: the term is our
    reading.
    """
    credit = estimate(batch)
    solved = solved_trajectories(batch)
    whole = np.ones(batch.n_groups, dtype=bool)
    group = batch.group[batch.first_rows]
    whole[group[~solved]] = False
    short = among_solved(batch, -run_sums(batch.tokens.astype(np.float64), batch.runs), whole[group], 1e-6)
    metrics = {"share_of_groups": mean(whole)}
    return replace(credit, advantage=credit.advantage + params.weight * short[batch.trajectory], metrics=metrics)
