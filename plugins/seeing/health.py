"""What is wrong with a run, in words: rules over its episodes and turns, each with a threshold and its evidence.

Rules look at steps (of ``global_step``, training episodes only) and say which ones. They are hints where to look, not
tests: every finding names the number that it rests on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verl_turnkey.plugins.seeing.join import Run, flag

if TYPE_CHECKING:
    import pandas as pd

RECENT = 3
"""steps that count as now"""


class Finding(NamedTuple):
    """What a rule found. ``filter``: query of the episodes' page that shows the evidence."""

    rule: str
    said: str
    threshold: str
    steps: list[int]
    filter: str = ""


Rule = Callable[["Seen"], Iterator[Finding]]
RULES: dict[str, Rule] = {}


class Seen:
    """Training episodes and turns by step."""

    def __init__(self, run: Run) -> None:
        train = run.episodes[run.whole & ~flag(run.episodes["validation"])]
        self.episodes = train.assign(
            success=flag(train["success"]), failed=train["failed"].notna(), truncated=flag(train["truncated"])
        )
        turns = run.turns[run.turns["at"].isin(train.index)]
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


def rule(function: Rule) -> Rule:
    RULES[function.__name__] = function
    return function


def findings(run: Run) -> list[dict[str, Any]]:
    """All findings of all rules, as plain data."""
    seen = Seen(run)
    return [found._asdict() for check in RULES.values() for found in check(seen)] if seen.steps else []


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1f} %"


def _range(steps: list[int]) -> str:
    return f"at step {steps[0]}" if len(steps) == 1 else f"in steps {steps[0]} to {steps[-1]}"


def _tail(per_step: pd.Series, limit: float, above: bool = True) -> list[int]:
    """The steps at the end of a run through which a number stays above (or below) a limit."""
    beyond = (per_step > limit if above else per_step < limit).to_numpy()
    start = len(beyond) - int(np.argmin(beyond[::-1])) if not beyond.all() else 0
    return [int(step) for step in per_step.index[start:]]


@rule
def no_signal(seen: Seen) -> Iterator[Finding]:
    """Groups whose episodes all have the same score: a comparison within them says nothing."""
    ok = seen.episodes[~seen.episodes["failed"]]
    groups = ok.groupby(["global_step", "group"]).agg(
        size=("score", "size"), low=("score", "min"), high=("score", "max"), won=("success", "max")
    )
    groups = groups[groups["size"] > 1]  # one episode alone is compared with nothing
    groups = groups.assign(same=groups["low"] == groups["high"]).reset_index()
    limit = 0.4
    if steps := _tail(seen.by_step(groups["same"], groups["global_step"]), limit):
        now = groups[groups["global_step"].isin(steps) & groups["same"]]
        lost, all_of = float((~now["won"].astype(bool)).mean()), groups["global_step"].isin(steps).sum()
        kind = "all lost" if lost > 0.8 else "all solved" if lost < 0.2 else f"{_percent(lost)} of these all lost"
        yield Finding(
            "no_signal",
            f"{_percent(len(now) / all_of)} of the groups have no signal {_range(steps)}: every episode has the same "
            f"score ({kind})",
            f"more than {_percent(limit)} of a step's groups",
            steps,
        )


@rule
def states_do_not_repeat(seen: Seen) -> Iterator[Finding]:
    """Methods that compare turns from the same state need states that several turns of a group were in."""
    later = seen.turns[(seen.turns["turn"] > 0) & seen.turns["state_key"].notna()]
    if not len(later):
        return
    alike = later.groupby(["group", "state_key"])["turn"].transform("size")
    per_step = seen.by_step(alike > 1, later["step"])
    limit = 0.1
    if steps := _tail(per_step, limit, above=False):
        yield Finding(
            "states_do_not_repeat",
            f"only {_percent(float(per_step.loc[steps].mean()))} of the turns {_range(steps)} are in a state that "
            "another turn of the group was in: there is nothing to compare for methods that compare states",
            f"less than {_percent(limit)} of the turns after the first",
            steps,
        )


@rule
def entropy_collapse(seen: Seen) -> Iterator[Finding]:
    """The policy stops to explore."""
    rows = seen.metrics[seen.metrics["name"] == "actor/entropy"].sort_values("train_step")
    curve = rows.set_index("train_step")["value"].dropna()
    if len(curve) < 2 * RECENT:
        return
    first = float(curve.iloc[:RECENT].mean())
    if first > 0 and (steps := _tail(curve, 0.2 * first, above=False)):
        yield Finding(
            "entropy_collapse",
            f"the policy's entropy fell from {first:.3g} to {float(curve.iloc[-1]):.3g}, {_range(steps)}",
            "less than a fifth of its first steps",
            steps,
        )


@rule
def collapse(seen: Seen) -> Iterator[Finding]:
    """Success that was there and went."""
    curve = seen.by_step(seen.episodes["success"], seen.episodes["global_step"]).rolling(RECENT, min_periods=1).mean()
    best = float(curve.max())
    if best < 0.2 or not (steps := _tail(curve, best / 2, above=False)):
        return
    yield Finding(
        "collapse",
        f"success fell from {_percent(best)} around step {int(curve.idxmax())} to {_percent(float(curve.iloc[-1]))}; "
        f"below half of its best {_range(steps)}",
        f"mean of {RECENT} steps below half of the best, which was at least 20 %",
        steps,
        f"step={steps[0]}&outcome=lost",
    )


@rule
def repetition(seen: Seen) -> Iterator[Finding]:
    """The same action again although the last time it changed nothing."""
    turns = seen.turns.sort_values(["at", "turn"])
    before = turns.shift(1)
    same = (turns["at"] == before["at"]) & (turns["action"] == before["action"])
    same &= turns["state_key"] == before["state_key"]
    per_step = seen.by_step(same, turns["step"])
    limit = 0.15
    if steps := _tail(per_step, limit):
        yield Finding(
            "repetition",
            f"{_percent(float(per_step.loc[steps].mean()))} of the turns {_range(steps)} repeat an action that "
            "changed nothing the turn before",
            f"more than {_percent(limit)} of the turns",
            steps,
        )


@rule
def prompts_cut(seen: Seen) -> Iterator[Finding]:
    """The model does not see all that the prompt's template gives."""
    per_step = seen.by_step(seen.turns["prompt_cut"], seen.turns["step"])
    limit = 0.05
    if steps := _tail(per_step, limit):
        yield Finding(
            "prompts_cut",
            f"{_percent(float(per_step.loc[steps].mean()))} of the prompts {_range(steps)} were cut to fit: raise "
            "data.max_prompt_length, or keep less history",
            f"more than {_percent(limit)} of the turns",
            steps,
        )


@rule
def invalid_rising(seen: Seen) -> Iterator[Finding]:
    """The share of turns without a valid action grows."""
    curve = seen.by_step(~seen.turns["valid"], seen.turns["step"])
    if len(curve) < 2 * RECENT:
        return
    lowest = float(curve.rolling(RECENT).mean().min())
    limit = lowest + 0.1
    if (steps := _tail(curve, limit)) and len(steps) < len(curve):
        yield Finding(
            "invalid_rising",
            f"invalid actions rose from {_percent(lowest)} to {_percent(float(curve.loc[steps].mean()))} "
            f"{_range(steps)}",
            f"10 points above the lowest mean of {RECENT} steps",
            steps,
            f"step={steps[0]}&sort=-invalid",
        )


@rule
def failures(seen: Seen) -> Iterator[Finding]:
    """Episodes that failed, by reason."""
    failed = seen.episodes[seen.episodes["failed"]]
    limit = 0.01
    if len(failed) <= limit * len(seen.episodes):
        return
    kinds = failed["failed_kind"].fillna("other").value_counts()
    named = ", ".join(f"{number} {kind}" for kind, number in kinds.head(3).items())
    steps = sorted(int(step) for step in failed["global_step"].dropna().unique())
    yield Finding(
        "failures",
        f"{len(failed)} of {len(seen.episodes)} episodes failed ({named}) and train nothing",
        f"more than {_percent(limit)} of the episodes",
        steps,
        "outcome=failed",
    )


@rule
def too_long(seen: Seen) -> Iterator[Finding]:
    """Most episodes end at a limit, not in the environment."""
    per_step = seen.by_step(seen.episodes["truncated"], seen.episodes["global_step"])
    limit = 0.5
    if steps := _tail(per_step, limit):
        yield Finding(
            "too_long",
            f"{_percent(float(per_step.loc[steps].mean()))} of the episodes {_range(steps)} ended at a limit: "
            "turnkey.rollout.max_turns, or the environment's own",
            f"more than {_percent(limit)} of the episodes",
            steps,
        )
