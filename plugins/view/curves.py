"""The charts of a run: curves by step, from its episodes, its turns and the trainer's metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from verl_turnkey.plugins.view.join import Run, flag
from verl_turnkey.plugins.view.training import TrainingHistory

if TYPE_CHECKING:
    import pandas as pd

KL = ("actor/ppo_kl", "actor/kl_loss", "critic/kl", "rollout_corr/kl")
CLIPPED = ("actor/pg_clipfrac",)
ENTROPY = ("actor/entropy",)
GRADIENT = ("actor/grad_norm",)
TIMES = 5
"""most parts of a step's time in their chart"""


def charts(run: Run) -> list[dict[str, Any]]:
    """Charts that have numbers, each with title, unit, range of y (or None) and series ``{label, x, y}``."""
    episodes, turns, steps = run.episodes, run.turns, run.steps
    turns = turns[run.own]
    step, validation = episodes["global_step"], flag(episodes["validation"]) & run.whole & run.first_ways
    training = ~flag(episodes["validation"]) & run.whole
    of_turn = step.to_numpy()[turns["at"].to_numpy()]
    train_turn = training[turns["at"].to_numpy()]
    training &= run.first_ways
    success = episodes["success"].where(episodes["failed"].isna(), False)

    def both(values: pd.Series) -> list[dict[str, Any] | None]:
        return [
            _means("training", values[training], step[training]),
            _means("validation", values[validation], step[validation]),
        ]

    parts = [
        _means(name.removeprefix("part.").replace("_", " "), turns[name].abs(), turns["train_step"])
        for name in (run.parts if len(run.parts) != 2 else run.parts[:1])
    ]
    invalid = turns.assign(invalid=~flag(turns["valid"])).loc[train_turn, "invalid"]
    kl = _means("in the reward", turns["kl"], turns["train_step"])
    clipped = _means("of the turns", turns["clip_share"], turns["train_step"])
    entropy = _means("of the turns", turns["entropy"], turns["train_step"])
    share, from_zero = [0, 1], [0, None]
    history = TrainingHistory(run)
    specs = [
        ("Success", "share of episodes", share, both(success)),
        ("Env return", "sum of the environment's rewards", None, both(episodes["env_return"])),
        ("Length", "turns per episode", None, both(episodes["turns"])),
        ("Invalid actions", "share of turns", from_zero, [_means("training", invalid, of_turn[train_turn])]),
        (
            "Repetition",
            "share of turns",
            from_zero,
            [
                _drawn("repeated in vain", history.repeated),
                _drawn("commonest action", history.commonest),
            ],
        ),
        ("Groups without signal", "share of groups", share, [_drawn("same composed return", history.without_signal)]),
        ("Credit", "mean size by part", from_zero, parts),
        ("Clipped", "share", from_zero, [_metric(steps, CLIPPED) or clipped]),
        ("KL", "", from_zero, [_metric(steps, KL) or kl]),
        ("Gradient", "norm before clipping", from_zero, [_metric(steps, GRADIENT)]),
        ("Entropy", "nats per token", from_zero, [_metric(steps, ENTROPY) or entropy]),
        ("Time", "seconds per step", from_zero, _times(steps)),
    ]
    drawn = [
        {"title": title, "unit": unit, "range": limits, "series": [s for s in series if s]}
        for title, unit, limits, series in specs
    ]
    return [chart for chart in drawn if chart["series"]]


def _means(label: str, values: pd.Series, step: Any) -> dict[str, Any] | None:
    """Mean by step of the numbers that are not missing."""
    mean = values.astype(float).groupby(np.asarray(step, float)).mean().dropna()
    return _series(label, mean) if len(mean) else None


def _drawn(label: str, by_step: pd.Series) -> dict[str, Any] | None:
    known = by_step.dropna()
    return _series(label, known) if len(known) else None


def _metric(steps: pd.DataFrame, names: tuple[str, ...]) -> dict[str, Any] | None:
    """The first of the trainer's metrics ``names`` that was logged."""
    for name in names:
        rows = steps[steps["name"] == name].dropna(subset="value")
        if len(rows):
            return _series(name, rows.groupby("train_step")["value"].last())
    return None


def _times(steps: pd.DataFrame) -> list[dict[str, Any] | None]:
    rows = steps[steps["name"].astype(str).str.startswith("timing_s/")]
    sums = rows.groupby("name")["value"].sum().sort_values(ascending=False, kind="stable")
    named = [_metric(steps, (name,)) for name in sums.index[:TIMES]]
    return [series and series | {"label": series["label"].removeprefix("timing_s/")} for series in named]


def _series(label: str, by_step: pd.Series) -> dict[str, Any]:
    by_step = by_step[np.isfinite(by_step.to_numpy(float))].sort_index()
    return {
        "label": label,
        "x": [int(x) for x in by_step.index],
        "y": [float(f"{y:.5g}") for y in by_step.to_numpy(float)],
    }
