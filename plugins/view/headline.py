"""A run in a sentence: success of its validation at the first step and at the last, with an interval."""

from __future__ import annotations

from typing import TYPE_CHECKING

from verl_turnkey.plugins.view.join import LoggedRun, flag
from verl_turnkey.plugins.view.stats import Interval, success

if TYPE_CHECKING:
    import pandas as pd


def headline(run: LoggedRun) -> str:
    """Such as ``0.36 → 0.91 on 64 held-out tasks [0.83, 0.96]``; of training where no validation is logged.

    Failed episodes count as not solved, as in the trainer's validation. The interval is that of the last number, at
    95 % (:func:`~verl_turnkey.plugins.view.stats.success`). Tasks that are trained on, too, are not called held-out.
    """
    episodes = run.episodes
    episodes = episodes.assign(
        solved=flag(episodes["success"]) & episodes["failed"].isna().to_numpy(),
        played=_tasks(episodes),
        validation=flag(episodes["validation"]),
    )[run.whole & run.first_ways].dropna(subset="global_step")
    validation = episodes[episodes["validation"]]
    rows = validation if len(validation) else episodes
    steps = sorted({int(step) for step in rows["global_step"]})
    if not steps:
        return "no episode of a whole group is logged yet"
    (before, tasks_before), (after, tasks) = (_success(rows, step) for step in (steps[0], steps[-1]))
    if not len(validation):
        numbers = f"{before.value:.2f} → {after.value:.2f}" if len(steps) > 1 else f"{after.value:.2f}"
        return f"success in training {numbers}, {_steps(steps)}; no validation is logged"
    seen = set(episodes["played"][~episodes["validation"]])
    kind = "validation" if seen & tasks else "held-out"
    on = f"{len(tasks)} {kind} task{'s' if len(tasks) > 1 else ''} [{after.low:.2f}, {after.high:.2f}]"
    if len(steps) == 1:
        return f"{after.value:.2f} on {on}, {_steps(steps)}"
    other = f" on {len(tasks_before)}" if tasks_before != tasks else ""  # a share of the groups is logged
    return f"{before.value:.2f}{other} → {after.value:.2f} on {on}, {_steps(steps)}"


def _success(rows: pd.DataFrame, step: int) -> tuple[Interval, set[str]]:
    tasks = rows[rows["global_step"] == step].groupby("played")["solved"]
    return success(tasks.sum().to_numpy(), tasks.size().to_numpy()), set(tasks.groups)


def _tasks(episodes: pd.DataFrame) -> pd.Series:
    """A key per task: the environment, its arguments, and the seed, or the task as in the data row."""
    key = episodes["seed"].astype(str).where(episodes["seed"].notna(), episodes["task"].astype(str))
    return episodes["env"].astype(str) + "\n" + episodes["kwargs"].astype(str) + "\n" + key


def _steps(steps: list[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
