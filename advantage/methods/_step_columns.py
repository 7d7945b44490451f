"""Extra columns: keys, and the numbers of process rewards and estimates, checked and without the gaps."""

from __future__ import annotations

from typing import Any

import numpy as np

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.columns import encode
from verl_turnkey.advantage.group_ops import Bools, Floats, Ints, Values
from verl_turnkey.advantage.params import ConfigError


def step_column(
    batch: StepBatch, method: str, name: str, low: float = -np.inf, high: float = np.inf, *, gaps: bool = False
) -> Floats:
    """``extra[name]``, one finite number from ``low`` to ``high`` per step -> (S,); with ``gaps`` also nan, for none.

    Raises:
        ConfigError: names the method, the column, the row and what stands there.
    """
    column = batch.extra[name]
    numbers = column if column.dtype != object else np.array([_number(value) for value in column], np.float64)
    good = np.isfinite(numbers) & (low <= numbers) & (numbers <= high)
    bad = np.flatnonzero(~(good | np.isnan(numbers) if gaps else good))
    if len(bad):
        row = int(bad[0])
        bounds = "" if low == -np.inf and high == np.inf else f" from {low:g} to {high:g}"
        bounds = f" >= {low:g}" if low > -np.inf and high == np.inf else bounds
        got = column[row] if column.dtype == object else float(column[row])
        raise ConfigError(
            f"{method}: extra.{name}: expected a finite number{bounds} on every step, got {got!r} in row {row}, "
            f"trajectory {batch.ids['trajectory'][batch.trajectory[row]]!r}, step {batch.step[row]}"
        )
    return numbers


def key_column(batch: StepBatch, name: str, blank: Bools | None = None) -> tuple[Ints, list[Any]]:
    """Codes (S,) of the keys in ``extra[name]``, texts or numbers, and the key behind each code.

    A None, a nan and a ``blank`` (S,) one match nothing: each has a code of its own, past those of all keys.
    """
    keys = [None if isinstance(key, float) and key != key else key for key in batch.extra[name].tolist()]
    if blank is not None:
        keys = [None if no else key for key, no in zip(keys, blank.tolist(), strict=True)]
    return encode(f"extra.{name}", keys, none_allowed=True)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else np.nan


def value_before(batch: StepBatch, method: str, name: str, low: float = -np.inf, high: float = np.inf) -> Floats:
    """:func:`step_column` of a value of the state *before* the step.

    A turn that never reached the environment says nothing of its state: ``turnkey_env`` writes 0. The state stayed, so
    an invalid step with a 0 has the value of the next step that has one; at the end of an episode that of the last.
    """
    values = step_column(batch, method, name, low, high)
    return before_step(values, ~batch.valid & (values == 0), batch)


def before_step(values: Values, blank: Bools, batch: StepBatch) -> Values:
    """``values`` (S,), the ``blank`` ones taken from the next step of the trajectory that has one, else from the last.

    Where no step of the trajectory has one they stay as they are.
    """
    return _filled(values, blank, batch, (_next_known, _last_known))


def value_after(batch: StepBatch, method: str, name: str, low: float = -np.inf, high: float = np.inf) -> Floats:
    """:func:`step_column` of a value of the state *after* the step; an invalid step with a 0 has that before it."""
    values = step_column(batch, method, name, low, high)
    return _filled(values, ~batch.valid & (values == 0), batch, (_last_known,))


def _filled(values: Values, blank: Bools, batch: StepBatch, sources: tuple) -> Values:
    """``values`` with the ``blank`` ones taken from the first of the ``sources`` that the trajectory has."""
    if not blank.any():
        return values
    order = batch.runs.order
    ordered, missing, trajectory = values[order], blank[order], batch.trajectory[order]
    filled, open_ = ordered.copy(), missing.copy()
    for source in sources:
        at: Ints = source(missing)
        found = open_ & (trajectory[at] == trajectory) & ~missing[at]
        filled[found] = ordered[at[found]]
        open_ &= ~found
    result = np.empty_like(values)
    result[order] = filled
    return result


def _last_known(missing: Bools) -> Ints:
    return np.maximum.accumulate(np.where(missing, 0, np.arange(len(missing))))


def _next_known(missing: Bools) -> Ints:
    last = len(missing) - 1
    return np.minimum.accumulate(np.where(missing, last, np.arange(len(missing)))[::-1])[::-1]
