"""What the trainer and the actor's ranks left in the trajectory log, against what the spy saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from launch import Run

from verl_turnkey.plugins.view.join import read

TURN = ["episode", "turn"]
ROW = ["train_step", "row_id", "turn_in_row"]


def of_step(run: Run, table: str, step: int) -> pd.DataFrame:
    rows = read(run.out / "episodes", table)
    return rows[rows["train_step"] == step]


def turns_of(
    run: Run,
    step: int,
    naive: Callable[[list[dict[str, Any]]], Sequence[float]] | None = None,
    *,
    updates: int = 1,
    epochs: int = 1,
) -> pd.DataFrame:
    """The turns that were trained in ``step``, each joined with its update in each epoch.

    Asserts that they are those of the spy's rows, each once; that the credit of a turn is that of a naive twin and the
    sum of its parts; and that importance ratios and clip shares are such.
    """
    expected: dict[tuple[str, int], float] = {}
    for update in range(updates):
        real = {key for (key,) in run.rows(step, "keys", update=update)}
        steps = [record for record in run.steps() if record["row"] in real]
        values = naive(steps) if naive else [np.nan] * len(steps)
        expected |= {(record["trajectory"], record["step"]): v for record, v in zip(steps, values, strict=True)}
    credit = of_step(run, "credit", step).set_index(TURN)
    assert credit.index.is_unique
    assert set(credit.index) == set(expected)
    if naive:
        np.testing.assert_allclose(credit["advantage"], [expected[key] for key in credit.index], atol=1e-5)
        parts = credit[[name for name in credit if name.startswith("part.")]]
        assert len(parts.columns) > 1
        np.testing.assert_allclose(parts.sum(axis=1), credit["advantage"], atol=1e-5)
    joined = credit.reset_index().merge(of_step(run, "updates", step), on=ROW, validate="one_to_many")
    assert len(joined) == epochs * len(credit) > 0
    assert joined.groupby(TURN)["epoch"].nunique().eq(epochs).all()
    assert (joined["ratio"] > 0).all()
    assert (joined["ratio_max"] >= joined["ratio"] * (1 - 1e-6)).all()
    assert joined["clip_share"].between(0, 1).all()
    assert (joined["entropy"].dropna() >= 0).all()
    return joined


def metrics_of(run: Run, step: int) -> dict[str, float]:
    """The metrics of a step in the log; asserts that they are those that verl logged."""
    rows = of_step(run, "steps", step)
    assert rows["name"].is_unique
    numbers = {name: value for name, value in zip(rows["name"], rows["value"], strict=True) if np.isfinite(value)}
    logged = run.metrics[step]  # numbers that are not finite are null there
    assert set(numbers) == {name for name, value in logged.items() if isinstance(value, int | float)}
    np.testing.assert_allclose([numbers[name] for name in numbers], [logged[name] for name in numbers], rtol=1e-6)
    return numbers
