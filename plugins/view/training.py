"""Training episodes and turns by step: the curves for the rules of ``health.py``, and the charts of a run."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from verl_turnkey.plugins.view.collapse import UPDATE, Curve, Kind
from verl_turnkey.plugins.view.join import LoggedRun, flag

if TYPE_CHECKING:
    import pandas as pd


class TrainingHistory:
    """Training episodes and turns of logged groups, by step.

    ``ways`` are all episodes, ``episodes`` those that are not branches; a turn that branches share occurs once.
    """

    def __init__(self, run: LoggedRun) -> None:
        episodes = run.episodes.assign(**{name: flag(run.episodes[name]) for name in ("success", "truncated")})
        episodes, validation = episodes.assign(failed=episodes["failed"].notna()), flag(episodes["validation"])
        self.validation = episodes[run.whole & validation & run.first_ways]
        train = self.ways = episodes[run.whole & ~validation]
        self.episodes = train[run.first_ways[train.index]]
        before = run.turns.shift(1)
        same = [run.turns[name] == before[name] for name in ("at", "action", "anchor")]
        there = run.own & run.turns["at"].isin(train.index)
        turns = run.turns.assign(repeats=same[0] & same[1] & same[2])[there]
        self.turns = turns.assign(
            step=train["global_step"].reindex(turns["at"]).to_numpy(),
            group=train["group"].reindex(turns["at"]).to_numpy(),
            valid=flag(turns["valid"]),
            prompt_cut=flag(turns["prompt_cut"]),
        )
        self.metrics = run.steps
        self.steps = sorted(int(step) for step in train["global_step"].dropna().unique())

    def by_step(self, values: pd.Series, step: pd.Series) -> pd.Series:
        """Mean of a column at each step."""
        return values.astype(float).groupby(step.to_numpy()).mean()

    def of_episodes(self, name: str) -> pd.Series:
        return self.by_step(self.episodes[name], self.episodes["global_step"])

    def metric(self, name: str) -> pd.Series:
        """A metric of the trainer, by step."""
        rows = self.metrics[self.metrics["name"] == name].sort_values("train_step")
        return rows.set_index("train_step")["value"].dropna()

    @cached_property
    def groups(self) -> pd.DataFrame:
        """Groups with several finished episodes: whether all have the ``same`` return, and whether any was ``won``."""
        ok = self.ways[~self.ways["failed"]]
        groups = ok.groupby(["global_step", "group"]).agg(
            size=("composed_return", "size"),
            low=("composed_return", "min"),
            high=("composed_return", "max"),
            won=("success", "max"),
        )
        groups = groups[groups["size"] > 1]  # a single episode has nothing to compare with
        return groups.assign(same=groups["low"] == groups["high"]).reset_index()

    @cached_property
    def without_signal(self) -> pd.Series:
        return self.by_step(self.groups["same"], self.groups["global_step"])

    @cached_property
    def repeated(self) -> pd.Series:
        """Share of the turns that repeat an action which changed nothing the turn before."""
        return self.by_step(self.turns["repeats"], self.turns["step"])

    @cached_property
    def commonest(self) -> pd.Series:
        """Share of the commonest action among the turns."""
        return self.turns.groupby("step")["action"].agg(lambda actions: actions.value_counts(normalize=True).max())

    @cached_property
    def success(self) -> Curve:
        return success_by_step(self.episodes)

    @cached_property
    def validated(self) -> Curve:
        """Success of validation by step."""
        return Curve(*_plain(self.by_step(self.validation["success"], self.validation["global_step"])), "share")

    def curves(self) -> dict[str, Curve]:
        """Readable name -> curve of a quantity that may change with success."""
        turns, shares = self.turns, "share"
        entropy = self.metric("actor/entropy")
        series: dict[str, tuple[pd.Series, Kind]] = {
            "groups without signal": (self.without_signal, shares),
            "turns per episode": (self.of_episodes("turns"), "size"),
            "episodes that end at a limit": (self.of_episodes("truncated"), shares),
            "turns that repeat an action without effect": (self.repeated, shares),
            "the commonest action's share of the turns": (self.commonest, shares),
            "turns without a valid action": (self.by_step(~turns["valid"], turns["step"]), shares),
            "prompts cut": (self.by_step(turns["prompt_cut"], turns["step"]), shares),
            "tokens per response": (self.by_step(turns["response_tokens"], turns["step"]), "size"),
            "failed episodes": (self.of_episodes("failed"), shares),
            "entropy": (entropy if len(entropy) else self.by_step(turns["entropy"], turns["step"]), "size"),
        }
        made = {name: Curve(*_plain(by), kind) for name, (by, kind) in series.items()}
        return made | {what: Curve(*_plain(self.metric(name)), "peak", least) for what, (name, least) in UPDATE.items()}


def success_by_step(episodes: pd.DataFrame) -> Curve:
    """Success of episodes (columns ``global_step``, ``group``, ``success``), with the effective episodes of a step.

    Episodes of a group resemble each other. The mean p of a step's G groups has the variance s^2 / G, where s is the
    standard deviation of the groups' means: that of p (1 - p) G / s^2 independent episodes, at least G and at most all.
    """
    steps = episodes.groupby("global_step")["success"]
    means = episodes.groupby(["global_step", "group"])["success"].mean().groupby("global_step")
    p, groups = means.mean(), means.size()
    noise = float((means.var() / groups).fillna(p * (1 - p)).sum())  # a single group: as if its episodes ended alike
    least, most = float(groups.mean()), float(steps.size().mean())
    independent = float((p * (1 - p)).sum())
    worth = independent / noise if noise else most if independent else least
    return Curve(*_plain(steps.mean()), "share", episodes=min(max(worth, least), most))


def _plain(by_step: pd.Series) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return by_step.index.to_numpy(float), by_step.to_numpy(float)


KL = ("actor/ppo_kl", "actor/kl_loss", "critic/kl", "rollout_corr/kl")
TIMES = 5
"""most parts of a step's time in their chart"""


def charts(run: LoggedRun) -> list[dict[str, Any]]:
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
    repetition = [_drawn("repeated without effect", history.repeated), _drawn("commonest action", history.commonest)]
    specs = [
        ("Success", "share of episodes", share, both(success)),
        ("Env return", "sum of the environment's rewards", None, both(episodes["env_return"])),
        ("Length", "turns per episode", None, both(episodes["turns"])),
        ("Invalid actions", "share of turns", from_zero, [_means("training", invalid, of_turn[train_turn])]),
        ("Repetition", "share of turns", from_zero, repetition),
        ("Groups without signal", "share of groups", share, [_drawn("equal returns", history.without_signal)]),
        ("Credit", "mean size by part", from_zero, parts),
        ("Clipped", "share", from_zero, [_metric(steps, "actor/pg_clipfrac") or clipped]),
        ("KL", "", from_zero, [_metric(steps, *KL) or kl]),
        ("Gradient", "norm before clipping", from_zero, [_metric(steps, "actor/grad_norm")]),
        ("Entropy", "nats per token", from_zero, [_metric(steps, "actor/entropy") or entropy]),
        ("Time", "seconds per step", from_zero, _times(steps)),
    ]
    drawn = [
        {"title": title, "unit": unit, "range": limits, "series": [s for s in series if s]}
        for title, unit, limits, series in specs
    ]
    return [chart for chart in drawn if chart["series"]]


def _means(label: str, values: pd.Series, step: Any) -> dict[str, Any] | None:
    """Mean by step of the numbers that are not missing."""
    return _drawn(label, values.astype(float).groupby(np.asarray(step, float)).mean())


def _metric(steps: pd.DataFrame, *names: str) -> dict[str, Any] | None:
    """The first of the trainer's metrics ``names`` that was logged."""
    drawn = (_drawn(name, steps[steps["name"] == name].groupby("train_step")["value"].last()) for name in names)
    return next(filter(None, drawn), None)


def _times(steps: pd.DataFrame) -> list[dict[str, Any] | None]:
    rows = steps[steps["name"].astype(str).str.startswith("timing_s/")]
    sums = rows.groupby("name")["value"].sum().sort_values(ascending=False, kind="stable")
    named = [_metric(steps, name) for name in sums.index[:TIMES]]
    return [series and series | {"label": series["label"].removeprefix("timing_s/")} for series in named]


def _drawn(label: str, by_step: pd.Series) -> dict[str, Any] | None:
    by_step = by_step.dropna()
    if not len(by_step):
        return None
    by_step = by_step[np.isfinite(by_step.to_numpy(float))].sort_index()
    return {
        "label": label,
        "x": [int(x) for x in by_step.index],
        "y": [float(f"{y:.5g}") for y in by_step.to_numpy(float)],
    }
