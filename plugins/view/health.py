"""What is wrong with a run, in words: rules over its episodes and turns, each with a threshold and evidence.

A rule names the steps (``global_step``, training episodes only) in which it holds. Findings are hints where to look,
not tests; each has the number that it rests on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from verl_turnkey.plugins.view.collapse import CHANCE, LEAST, RECENT, change_rows, changes, fall, formatted
from verl_turnkey.plugins.view.join import LoggedRun
from verl_turnkey.plugins.view.training import TrainingHistory

if TYPE_CHECKING:
    import pandas as pd


class Finding(NamedTuple):
    """What a rule reports.

    ``filter``: query for the episodes' page; ``evidence``: what changed then (``collapse.change_rows``); ``mark``: the
    step that charts mark.
    """

    rule: str
    message: str
    threshold: str
    steps: list[int]
    filter: str = ""
    evidence: Sequence[dict[str, Any]] = ()
    mark: int | None = None


MOSTLY_INVALID = 0.5
VALIDATION_FAILED = re.compile(r"val-aux/.*/failed/mean@\d+")
Rule = Callable[[TrainingHistory], Iterator[Finding]]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    RULES[function.__name__] = function
    return function


def findings(run: LoggedRun) -> list[dict[str, Any]]:
    """All findings of all rules, as plain data."""
    history = TrainingHistory(run)
    return [finding._asdict() for check in RULES.values() for finding in check(history)] if history.steps else []


def _percent(share: float) -> str:
    return formatted(share, "share")


def _range(steps: list[int]) -> str:
    return f"at step {steps[0]}" if len(steps) == 1 else f"in steps {steps[0]} to {steps[-1]}"


def _mean(per_step: pd.Series, steps: list[int]) -> str:
    return _percent(float(per_step.loc[steps].mean()))


def _tail(per_step: pd.Series, limit: float, above: bool = True) -> list[int]:
    """The last steps of a run, through which a number stays above (or below) a limit."""
    beyond = (per_step > limit if above else per_step < limit).to_numpy()
    start = len(beyond) - int(np.argmin(beyond[::-1])) if not beyond.all() else 0
    return [int(step) for step in per_step.index[start:]]


def _lasting(rule: str, per_step: pd.Series, limit: float, message: str, of: str) -> Iterator[Finding]:
    """A share that stays above a limit to the end; ``message``: with fields for the share and the steps."""
    if steps := _tail(per_step, limit):
        text = message.format(_mean(per_step, steps), _range(steps))
        yield Finding(rule, text, f"more than {_percent(limit)} of the {of}", steps)


@rule
def collapse(history: TrainingHistory) -> Iterator[Finding]:
    """Success that was lost, for good or for a while."""
    drop = fall(history.success, history.validated)
    if drop is None:
        return
    state = "is" if drop.back is None else "was"
    since = "" if drop.back is None else f", and above it again from step {drop.back}"
    yield Finding(
        "collapse",
        f"Success fell from {_percent(drop.best)} around step {drop.best_at} to {_percent(drop.last)}, most of it "
        f"at step {drop.turn}. It {state} below half of its best {_range(drop.steps)}{since}",
        f"mean of {drop.width} steps below half of the best, which was at least {_percent(LEAST)}; chance shows "
        f"such a fall in less than 1 run of {1 / CHANCE:.0f}",
        drop.steps,
        f"step={drop.turn}&outcome=unsolved&split=training",
        change_rows(drop, changes(history.curves(), drop)),
        drop.turn,
    )


@rule
def no_signal(history: TrainingHistory) -> Iterator[Finding]:
    """Groups whose episodes all have the same composed return: a comparison within the group has no signal."""
    groups, limit = history.groups, 0.4
    if steps := _tail(history.without_signal, limit):
        now = groups[groups["global_step"].isin(steps) & groups["same"]]
        share, all_of = float((~now["won"].astype(bool)).mean()), groups["global_step"].isin(steps).sum()
        some = f"{_percent(share)} of these all unsolved"
        kind = "all unsolved" if share > 0.8 else "all solved" if share < 0.2 else some
        invalid = float((~history.turns["valid"][history.turns["step"].isin(steps)]).mean())
        advice = {
            "all solved": ". The tasks have become too easy: take harder ones",
            "all unsolved": ". The tasks are still too hard: take easier ones, or more episodes per task (rollout.n)"
            if invalid < MOSTLY_INVALID
            else f". {_percent(invalid)} of their turns have no valid action: fix that first",
        }.get(kind, "")
        yield Finding(
            "no_signal",
            f"{_percent(len(now) / all_of)} of the groups have no signal {_range(steps)}: every episode has the same "
            f"composed return ({kind}){advice}",
            f"more than {_percent(limit)} of a step's groups",
            steps,
        )


@rule
def states_do_not_repeat(history: TrainingHistory) -> Iterator[Finding]:
    """Methods that compare turns from the same state need states that several turns of a group share."""
    later = history.turns[(history.turns["turn"] > 0) & history.turns["anchor"].notna()]
    if not len(later):
        return
    alike = later.groupby(["group", "anchor"])["turn"].transform("size")
    per_step = history.by_step(alike > 1, later["step"])
    limit = 0.1
    if steps := _tail(per_step, limit, above=False):
        yield Finding(
            "states_do_not_repeat",
            f"Only {_mean(per_step, steps)} of the turns {_range(steps)} share their state with "
            "another turn of the group: a method that compares turns from the same state has nothing to compare",
            f"less than {_percent(limit)} of the turns after the first",
            steps,
        )


@rule
def entropy_collapse(history: TrainingHistory) -> Iterator[Finding]:
    """The policy stops exploring."""
    curve = history.metric("actor/entropy")
    if len(curve) < 2 * RECENT:
        return
    first = float(curve.iloc[:RECENT].mean())
    if first > 0 and (steps := _tail(curve, 0.2 * first, above=False)):
        yield Finding(
            "entropy_collapse",
            f"The policy's entropy fell from {first:.3g} to {float(curve.iloc[-1]):.3g}, {_range(steps)}",
            "less than a fifth of its first steps",
            steps,
        )


@rule
def repetition(history: TrainingHistory) -> Iterator[Finding]:
    """An action is repeated although it changed nothing the last time."""
    message = "{} of the turns {} repeat an action that changed nothing the turn before"
    return _lasting("repetition", history.repeated, 0.15, message, "turns")


@rule
def prompts_cut(history: TrainingHistory) -> Iterator[Finding]:
    """The model does not see the whole prompt."""
    per_step = history.by_step(history.turns["prompt_cut"], history.turns["step"])
    message = "{} of the prompts {} were cut to fit: raise data.max_prompt_length, or keep less history"
    return _lasting("prompts_cut", per_step, 0.05, message, "turns")


@rule
def invalid(history: TrainingHistory) -> Iterator[Finding]:
    """The model does not write the action format, from the first step on."""
    curve = history.by_step(~history.turns["valid"], history.turns["step"])
    first = [int(step) for step in curve.index[:RECENT]]
    share = float(curve.iloc[:RECENT].mean())
    if not first or share < MOSTLY_INVALID:  # without turns, all episodes having failed, the share is NaN
        return
    turns = history.turns[~history.turns["valid"] & history.turns["step"].isin(first)]
    reasons = turns["parse_note"].dropna().value_counts()
    reason = f", most often: {reasons.index[0][:200]}" if len(reasons) else ""
    tokens = history.turns["response_tokens"]
    cut = float((turns["response_tokens"] == tokens.max()).mean()) if tokens.notna().any() else 0.0
    limit = (
        f". {_percent(cut)} of them end at {int(tokens.max())} tokens, the longest response: "
        "turnkey.rollout.max_tokens_per_turn or data.max_response_length cuts them off"
        if cut > MOSTLY_INVALID and tokens.nunique() > 1
        else ""
    )
    yield Finding(
        "invalid",
        f"{_percent(share)} of the turns {_range(first)} have no valid action{reason}{limit}. The model does not know "
        "the format: turnkey.rollout.action_format, example turns (turnkey.rollout.examples), the template, or a warm "
        "start by imitation (docs: own-environment)",
        f"more than {_percent(MOSTLY_INVALID)} of the turns of the first {RECENT} steps",
        first,
        f"step={first[0]}&sort=-invalid",
    )


@rule
def probabilities_differ(history: TrainingHistory) -> Iterator[Finding]:
    """Rollout and trainer compute different probabilities of the same tokens."""
    curve, limit = history.metric("training/rollout_probs_diff_mean"), 0.05
    if len(curve) and (steps := _tail(curve, limit)):
        yield Finding(
            "probabilities_differ",
            f"Rollout and trainer differ by {float(curve.loc[steps].mean()):.2g} in the probability of a token "
            f"{_range(steps)}: compare their precision, or train on fresher episodes",
            f"more than {limit} on average",
            steps,
        )


@rule
def validation_failures(history: TrainingHistory) -> Iterator[Finding]:
    """Validation episodes that failed, which count as not solved."""
    names = [name for name in history.metrics["name"].unique() if VALIDATION_FAILED.fullmatch(name)]
    limit = 0.01
    for name in names:
        curve = history.metric(name)
        if steps := [int(step) for step in curve.index[curve > limit]]:
            yield Finding(
                "validation_failures",
                f"{_mean(curve, steps)} of the validation episodes failed {_range(steps)} and "
                "count as not solved; the reasons are in the column failed of the log",
                f"more than {_percent(limit)} of a validation",
                steps,
                "outcome=failed",
            )


@rule
def invalid_rising(history: TrainingHistory) -> Iterator[Finding]:
    """The share of turns without a valid action grows."""
    curve = history.by_step(~history.turns["valid"], history.turns["step"])
    if len(curve) < 2 * RECENT:
        return
    lowest = float(curve.rolling(RECENT).mean().min())
    limit = lowest + 0.1
    if (steps := _tail(curve, limit)) and len(steps) < len(curve):
        yield Finding(
            "invalid_rising",
            f"Invalid actions rose from {_percent(lowest)} to {_mean(curve, steps)} {_range(steps)}",
            f"10 points above the lowest mean of {RECENT} steps",
            steps,
            f"step={steps[0]}&sort=-invalid",
        )


@rule
def failures(history: TrainingHistory) -> Iterator[Finding]:
    """Episodes that failed, by reason."""
    failed = history.episodes[history.episodes["failed"]]
    limit = 0.01
    if len(failed) <= limit * len(history.episodes):
        return
    kinds = failed["failed_kind"].fillna("other").value_counts()
    named = ", ".join(f"{number} {kind}" for kind, number in kinds.head(3).items())
    steps = sorted(int(step) for step in failed["global_step"].dropna().unique())
    yield Finding(
        "failures",
        f"{len(failed)} of {len(history.episodes)} episodes failed ({named}) and train nothing",
        f"more than {_percent(limit)} of the episodes",
        steps,
        "outcome=failed",
    )


@rule
def too_long(history: TrainingHistory) -> Iterator[Finding]:
    """Most episodes end at a limit, not in the environment."""
    message = "{} of the episodes {} ended at a limit: turnkey.rollout.max_turns, or the environment's own"
    return _lasting("too_long", history.of_episodes("truncated"), 0.5, message, "episodes")
