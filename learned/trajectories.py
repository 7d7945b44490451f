"""The trajectories of a batch of steps, as objectives compare them: their values, groups and outcomes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_turnkey.advantage import StepBatch
from verl_turnkey.learned.registry import ObjectiveParams


@dataclass(frozen=True)
class Trajectories:
    """T trajectories: ``value`` (T,) with a gradient, ``group`` (T,) int64, ``outcome`` (T,) and ``positive`` (T,)."""

    value: Tensor
    group: Tensor
    outcome: Tensor
    positive: Tensor

    @classmethod
    def of(cls, q: Tensor, table: StepBatch, params: ObjectiveParams) -> Trajectories:
        """``value`` is beta times the sum, or mean, of ``q`` (S,) over the steps of each trajectory."""
        number = table.n_trajectories
        of_step = torch.tensor(table.trajectory)
        value = params.beta * q.new_zeros(number).index_add(0, of_step, q)
        if params.over == "mean":
            value = value / torch.bincount(of_step, minlength=number)
        first = torch.tensor(table.first_rows)
        outcome = torch.tensor(table.score, dtype=torch.float64)[first]
        return cls(value, torch.tensor(table.group)[first], outcome, _positive(outcome, of_step, table, params))


def _positive(outcome: Tensor, of_step: Tensor, table: StepBatch, params: ObjectiveParams) -> Tensor:
    if params.positive != "success":
        return outcome > params.positive
    if "success" not in table.given:
        return outcome > 0
    solved = torch.tensor(table.success)
    return torch.zeros(len(outcome), dtype=torch.int64).index_add(0, of_step, solved.long()) > 0
