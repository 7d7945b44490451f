"""Extra columns: keys, roles, and the numbers of process rewards and estimates, checked and without the gaps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from verl_turnkey.advantage import group_ops as ops
from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.columns import Bools, encode
from verl_turnkey.advantage.group_ops import Floats, Ints, Runs
from verl_turnkey.advantage.params import ConfigError


def step_column(
    batch: StepBatch,
    method: str,
    name: str,
    low: float = -np.inf,
    high: float = np.inf,
    *,
    gaps: bool = False,
    rows: Ints | None = None,
) -> Floats:
    """``extra[name]``, one finite number from ``low`` to ``high`` per step -> (S,); with ``gaps`` also nan, for none.

    ``rows`` (R,): of these steps alone -> (R,); what stands in others does not matter.

    Raises:
        ConfigError: names the method, the column, the row and what stands there.
    """
    column = batch.extra[name]
    rows = np.arange(len(batch)) if rows is None else rows
    column = column[rows]
    numbers = column
    if column.dtype == object:
        numbers = np.array([float(x) if isinstance(x, int | float) else np.nan for x in column], np.float64)
    good = np.isfinite(numbers) & (low <= numbers) & (numbers <= high)
    bad = np.flatnonzero(~(good | np.isnan(numbers) if gaps else good))
    if len(bad):
        at, row = int(bad[0]), int(rows[bad[0]])
        bounds = "" if low == -np.inf and high == np.inf else f" from {low:g} to {high:g}"
        bounds = f" >= {low:g}" if low > -np.inf and high == np.inf else bounds
        bounds = f" <= {high:g}" if low == -np.inf and high < np.inf else bounds
        got = column[at] if column.dtype == object else float(column[at])
        raise ConfigError(
            f"{method}: extra.{name}: expected a finite number{bounds} on every step, got {got!r} in row {row}, "
            f"trajectory {batch.ids['trajectory'][batch.trajectory[row]]!r}, step {batch.step[row]}"
        )
    return numbers


def key_column(batch: StepBatch, name: str) -> tuple[Ints, list[Any]]:
    """Codes (S,) of the keys in ``extra[name]``, texts or numbers, and the key behind each code.

    A None and a nan match nothing: each has a code of its own, past those of all keys.
    """
    keys = [None if isinstance(key, float) and key != key else key for key in batch.extra[name].tolist()]
    return encode(f"extra.{name}", keys, none_allowed=True)


def filled(batch: StepBatch, name: str) -> Bools:
    """Which steps have an entry of their own in ``extra[name]`` (S,): neither None nor nan, nor a 0 that fills a gap.

    A turn that never reached the environment has 0 where others have a number, so the 0 of an invalid step is none.
    """
    column = batch.extra[name]
    if column.dtype != object:
        return ~np.isnan(column) & (batch.valid | (column != 0))

    def fills(value: Any, valid: bool) -> bool:
        if isinstance(value, int | float):
            return value == value and (valid or value != 0)
        return value is not None

    return np.fromiter(map(fills, column, batch.valid), dtype=bool, count=len(column))


def first_filled(batch: StepBatch, name: str) -> Ints:
    """The row of each trajectory's earliest step that is :func:`filled`, for a column of one value per trajectory.

    Trajectories without such a step are left out.
    """
    rows = batch.runs.order[filled(batch, name)[batch.runs.order]]
    return rows[np.unique(batch.trajectory[rows], return_index=True)[1]]


def value_after(batch: StepBatch, method: str, name: str) -> Floats:
    """:func:`step_column` of a value of the state *after* the step.

    ``turnkey_env`` writes 0 for a turn that never reached the environment. The state stayed, so an invalid step with a
    0 has the value of the last step that has one.
    """
    result = step_column(batch, method, name)
    before = ops.previous_values(np.arange(len(batch)), batch.runs, -1)
    for row in batch.runs.order[(~batch.valid & (result == 0))[batch.runs.order]].tolist():
        result[row] = result[before[row]] if before[row] >= 0 else 0.0
    return result


def refuse_trees(batch: StepBatch, what: str) -> None:
    """Raises ConfigError: a trajectory is a tree of steps, which ``what`` does not follow."""
    if (tree := batch.runs.tree) is not None:
        before = ops.previous_values(np.arange(len(batch)), replace(batch.runs, tree=None), -1)
        row = int(np.argmax(tree.parent != before))
        name = batch.ids["trajectory"][batch.trajectory[row]]
        role = batch.extra["role"][row] if "extra.role" in batch.given else None
        name = name[0] if isinstance(name, tuple) and name[1:] == (role,) else name  # of StepBatch.by_role
        raise ConfigError(
            f"{what} follows one conversation per episode, but the {role if isinstance(role, str) else 'episode'}'s "
            f"calls ran in parallel or branched ({name}): choose another method"
        )


def tool_calls(batch: StepBatch, method: str) -> Floats:
    """The sum of ``extra.tool_calls`` over each trajectory -> (n_trajectories,)."""
    return ops.run_sums(step_column(batch, method, "tool_calls", 0.0), batch.runs)


@dataclass(frozen=True)
class Roles:
    """Roles of a batch, P of them, and their episodes, E: the steps of one trajectory that one role took.

    ``role`` (S,): code of each step's role; ``ids`` (P,): the roles as text, by which metrics and states name them.
    ``runs``: the steps of each episode in order; ``episode`` (S,): the episode of each step; ``first`` (E,): its
    earliest step.
    """

    role: Ints
    ids: list[str]
    runs: Runs
    episode: Ints
    first: Ints


def read_roles(batch: StepBatch) -> Roles:
    """Roles from ``extra.role``: texts or numbers; all None are one role.

    Raises:
        ConfigError: two roles have the same text, as 1 and "1" have.
    """
    refuse_trees(batch, "extra.role")
    role, ids = key_column(batch, "role")
    if len(role) and role.max() >= len(ids):
        role, ids = np.minimum(role, len(ids)), [*ids, None]
    episode, _ = ops.joint_codes(batch.trajectory, role)
    runs = ops.sort_runs(episode, batch.step)
    return Roles(role, _texts(ids), runs, episode, runs.order[runs.starts])


def _texts(ids: list[Any]) -> list[str]:
    """The roles as text, a whole number without a point, whatever the type of the column it stands in."""
    roles: dict[str, Any] = {}
    for role in ids:
        whole = isinstance(role, bool) or (isinstance(role, float) and role.is_integer())
        text = str(int(role) if whole else role)
        if text in roles:
            raise ConfigError(
                f"extra.role: expected roles with different texts, got {roles[text]!r} and {role!r}: name one otherwise"
            )
        roles[text] = role
    return list(roles)


def episode_outcomes(batch: StepBatch, roles: Roles) -> Floats:
    """Outcome of each role's episode (E,): the score of its earliest step when given, else the sum of its rewards."""
    return batch.score[roles.first] if "score" in batch.given else ops.run_sums(batch.reward, roles.runs)


def role_metrics(name: str, values: Floats, codes: Ints, roles: Roles) -> dict[str, float]:
    """Number of roles, and the mean of ``values`` per role, as metrics."""
    means = ops.group_stats(values, codes, len(roles.ids)).mean
    return {
        "credit/roles": float(len(roles.ids)),
        **{f"credit/{name}/{role}": float(mean) for role, mean in zip(roles.ids, means, strict=True)},
    }
