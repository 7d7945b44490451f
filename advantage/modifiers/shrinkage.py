"""V_0.5: the baseline of a small group is drawn towards what was known of its task before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from verl_turnkey.advantage.batch import Credit, StepBatch
from verl_turnkey.advantage.columns import LARGEST_REWARD
from verl_turnkey.advantage.group_ops import ROUNDING, Floats, GroupStats, equal, group_stats, mean
from verl_turnkey.advantage.methods._episode_level import outcomes, refuse_outcomes
from verl_turnkey.advantage.methods._step_columns import first_filled, step_column
from verl_turnkey.advantage.modifying import Estimate, register_modifier
from verl_turnkey.advantage.params import BelowOne, ConfigError, Ranged, check


@dataclass(frozen=True)
class ShrinkageParams(Ranged):
    """Parameters of ``shrinkage``, the method and the modifier."""

    low: float = 0.0  # the smallest outcome possible; -1 in the paper
    high: float = 1.0  # the largest outcome possible
    prior: Literal["running", "given"] = "running"
    """what was known before: a moving average of the task's outcomes (extra.task), or the column extra.prior"""
    decay: BelowOne = 0.5  # of the moving average, for each batch that the task is in

    def __post_init__(self) -> None:
        super().__post_init__()
        check(-LARGEST_REWARD <= self.low < self.high, "low", f"from -1e18 to below high={self.high:g}", self.low)
        check(self.high <= LARGEST_REWARD, "high", "at most 1e18", self.high)

    @property
    def also_needs(self) -> tuple[str, ...]:
        return ("extra.prior",) if self.prior == "given" else ("extra.task",)

    @property
    def remembers(self) -> bool:
        return self.prior == "running"


@register_modifier(
    "shrinkage",
    params=ShrinkageParams,
    stateful=True,
    bounded_outcomes=True,
    paper="V_0.5, arXiv:2603.10848",
    summary="draws the baseline of each group towards an earlier estimate of its task's outcome",
)
def shrinkage(batch: StepBatch, params: ShrinkageParams, estimate: Estimate, state: Mapping[str, float]) -> Credit:
    """The baseline b in place of the group's mean m, with k trajectories, and V the prior of the task.

    ::

        s  = (high - low)^2 / 4 / k                   the largest variance that a mean of k outcomes can have
        D2 = max(0, (m - V)^2 - s)
        w  = D2 / (D2 + s)                            b = w m + (1 - w) V
        A  = A + (m - b) = A + (1 - w) (m - V)

    On a credit of R - m that is R - b. Without a prior, in the first batch of a task, b = m. A constant group is not 0
    where its mean is not the prior.

    Source: arXiv:2603.10848, from notes with all formulas, for outcomes -1 and 1: there s is 1/k. Other ranges are the
    same after mapping them to [-1, 1]. Its prior is a frozen model; the moving average is our reading: ``state`` holds
    it by the text of ``extra.task``.
    """
    credit = estimate(batch)
    outcome, stats = outcomes(batch, "outcomes")
    bad = (outcome < params.low - ROUNDING) | (outcome > params.high + ROUNDING)
    expected = f"shrinkage: expected outcomes in [low, high] = [{params.low:g}, {params.high:g}]"
    refuse_outcomes(batch, outcome, bad, expected, "set low and high to the range of outcomes")
    by_column = params.prior == "given"
    tasks: list[str | None] = [None] * batch.n_groups if by_column else _tasks(batch)
    earlier = [np.nan if task is None else state.get(task, np.nan) for task in tasks]
    prior = _column_prior(batch, params) if by_column else np.array(earlier, np.float64)
    has_prior = ~np.isnan(prior)
    prior = np.where(has_prior, prior, stats.mean)
    variance = (params.high - params.low) ** 2 / 4 / np.maximum(stats.size, 1)
    gap = np.where(equal(prior, stats.mean), 0.0, stats.mean - prior)
    excess = np.maximum(0.0, gap**2 - variance)
    weight = excess / (excess + variance)
    shift = ((1 - weight) * gap)[batch.group]
    metrics = {"weight/mean": mean(weight), "shift/mean": mean(shift), "share_known": mean(has_prior)}
    now = _updated(tasks, state, stats, params.decay)
    return replace(credit, advantage=credit.advantage + shift, metrics=metrics, state=now)


def _column_prior(batch: StepBatch, params: ShrinkageParams) -> Floats:
    """``extra.prior`` of each group (G,): the mean over trajectories, by the first step of each that has it.

    nan for a group in which none has.
    """
    rows = first_filled(batch, "prior")
    column = step_column(batch, "shrinkage", "prior", params.low, params.high, rows=rows)
    stats = group_stats(column, batch.group[rows], batch.n_groups)
    return np.where(stats.size > 0, stats.mean, np.nan)


def _tasks(batch: StepBatch) -> list[str | None]:
    """Key of each group's task as a text; None without one."""
    tasks: list[str | None] = [None] * batch.n_groups
    for row in first_filled(batch, "task").tolist():
        key: Any = batch.extra["task"][row]
        group = int(batch.group[row])
        task = str(int(key) if isinstance(key, float) and key.is_integer() else key)
        if tasks[group] not in (None, task):
            raise ConfigError(
                f"shrinkage: extra.task: expected one task in a group, got {tasks[group]!r} and {task!r} in group "
                f"{batch.ids['group'][group]!r}: trajectories of one group must play the same task"
            )
        tasks[group] = task
    return tasks


def _updated(tasks: list[str | None], state: Mapping[str, float], stats: GroupStats, decay: float) -> dict[str, float]:
    """The averages after the batch; several groups of one task count once, by the mean of their means."""
    outcomes_of: dict[str, list[float]] = {}
    for task, value in zip(tasks, stats.mean.tolist(), strict=True):
        if task is not None:
            outcomes_of.setdefault(task, []).append(value)
    means = {task: mean(np.array(values)) for task, values in outcomes_of.items()}
    return {**state, **{t: decay * state[t] + (1 - decay) * m if t in state else m for t, m in means.items()}}
