"""Chosen episodes of a log as conversations: for the terminal, and as JSON lines for other programs."""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from verl_turnkey.advantage.params import ConfigError
from verl_turnkey.plugins.log.schema import holds_integers
from verl_turnkey.plugins.view.join import REASONS, LoggedRun, flag, read
from verl_turnkey.plugins.view.notes import read_notes
from verl_turnkey.plugins.view.pack import chat, rounded, task_name

if TYPE_CHECKING:
    import pandas as pd

OUTCOMES = ("solved", "unsolved", "failed")
SPAN = re.compile(r"\s*(?:(\d*)\s*-\s*(\d*)|(\d+))\s*")
"""10-20, 10-, -20 or 12"""
INTERNAL = ("at", "reason", "trained_turn", "step", "segment", "episode")
TEXTS = ("prompt_tail", "response", "observation", "task_text", "first_observation", "opponents")


def matching(run: LoggedRun, filters: Sequence[str]) -> np.ndarray:
    """The rows of ``run.episodes`` that fit all ``filters``, each ``KEY=VALUE`` with the keys of the page's filters.

    Raises:
        ConfigError: a key or a value that there is not.
    """
    rows = np.ones(len(run.episodes), bool)
    for condition in filters:
        key, equals, value = condition.partition("=")
        if not equals or key not in FILTERS:
            raise ConfigError(f"--filter {condition}: expected KEY=VALUE, where KEY is one of {', '.join(FILTERS)}")
        try:
            rows &= np.asarray(FILTERS[key](run, value), bool)
        except ValueError:
            raise ConfigError(f"--filter {condition}: expected {key}={EXPECTED[key]}, got {value!r}") from None
    return np.flatnonzero(rows)


def outcomes(run: LoggedRun) -> np.ndarray:
    """The outcome of each episode, one of ``OUTCOMES``."""
    solved = np.where(flag(run.episodes["success"]), "solved", "unsolved")
    return np.where(run.episodes["failed"].notna(), "failed", solved)


def _of_names(values: np.ndarray | pd.Series, name: str, names: Sequence[str]) -> Any:
    if name not in names:
        raise ValueError(name)
    return values == name


def _step(run: LoggedRun, value: str) -> Any:
    steps = run.episodes["global_step"]
    return steps == (steps.max() if value == "last" else int(value))


def _split(run: LoggedRun, value: str) -> Any:
    split = np.where(flag(run.episodes["validation"]), "validation", "training")
    return _of_names(split, value, ("training", "validation"))


def _turns(run: LoggedRun, value: str) -> Any:
    match = SPAN.fullmatch(value)
    if not match or not any(match.groups()):
        raise ValueError(value)
    low, high = (match[3], match[3]) if match[3] else (match[1] or 0, match[2] or math.inf)
    return run.episodes["turns"].between(float(low), float(high))


def _credit(run: LoggedRun, value: str) -> Any:
    low, _, high = value.partition(",")
    if not low and not high:
        raise ValueError(value)
    by_episode = run.turns.groupby("at")["advantage"].agg(["min", "max"]).reindex(range(len(run.episodes)))
    worst, best = by_episode["min"], by_episode["max"]
    return (best >= float(low) if low else best.notna()) & (worst <= float(high) if high else best.notna())


def _kind(run: LoggedRun, value: str) -> Any:
    return run.episodes["failed"].notna() & (run.episodes["failed_kind"].fillna("other") == value)


def _task(run: LoggedRun, value: str) -> Any:
    tasks = run.episodes["task"].astype(str)
    return (tasks == value) | (tasks.map(task_name) == value)


def _query(run: LoggedRun, value: str) -> Any:
    task, *others = (run.episodes[name].astype(str) for name in ("task", "seed", "episode", "env"))
    for other in others:
        task = task + " " + other
    return task.str.lower().str.contains(value.lower(), regex=False)


FILTERS = {
    "step": _step,
    "split": _split,
    "outcome": lambda run, value: _of_names(outcomes(run), value, OUTCOMES),
    "kind": _kind,
    "task": _task,
    "turns": _turns,
    "credit": _credit,
    "q": _query,
}
EXPECTED = {
    "step": "a number, or last",
    "split": "training or validation",
    "outcome": "solved, unsolved or failed",
    "turns": "12, 10-20, 10- or -20",
    "credit": "LOW,HIGH, LOW, or ,HIGH",
}


def last_step(run: LoggedRun) -> np.ndarray:
    """The training episodes of the last step; where there are none, those of the last validation."""
    validation, steps = flag(run.episodes["validation"]), run.episodes["global_step"].fillna(-1).to_numpy()
    rows = validation if validation.all() else ~validation
    return np.flatnonzero(rows & (steps == steps[rows].max()))


def extremes(run: LoggedRun, rows: np.ndarray, limit: int) -> np.ndarray:
    """At most ``limit`` of ``rows``: half of them the best by return, half the worst, failed ones last; best first."""
    returns = run.episodes["composed_return"].to_numpy(float)[rows]
    ordered = rows[np.argsort(-np.where(np.isnan(returns), -np.inf, returns), kind="stable")]
    if len(ordered) <= limit:
        return ordered
    return np.concatenate([ordered[: (limit + 1) // 2], ordered[len(ordered) - limit // 2 :]])


@dataclass(frozen=True)
class Conversation:
    """An episode and its turns; columns as in the log, without those that are null."""

    episode: dict[str, Any]
    outcome: str
    turns: list[dict[str, Any]] = field(default_factory=list)
    """with texts and credit; ``no_credit`` is why there is none"""

    @property
    def has_texts(self) -> bool:
        whole = len(self.turns) == self.episode.get("turns", len(self.turns))  # files of the log may be lost
        return whole and all("response" in turn for turn in self.turns)


def conversations(run: LoggedRun, rows: Sequence[int] | np.ndarray) -> Iterator[Conversation]:
    """The episodes ``rows`` of ``run.episodes``, in the order of their steps; texts are read step by step."""
    episodes, results, notes = run.episodes.iloc[np.asarray(rows)], outcomes(run), read_notes(run.folder)
    for step, of_step in episodes.groupby("step", sort=True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # load() has warned of what it cannot read
            texts = read(run.folder, "texts", [int(step)])
        texts = texts[texts["episode"].isin(of_step["episode"])].drop_duplicates(["episode", "turn"], keep="last")
        turns = run.turns[run.turns["at"].isin(of_step.index)]
        turns = turns.merge(texts[["episode", "turn", *TEXTS]], on=["episode", "turn"], how="left")
        by_episode = {at: _rows(of_episode) for at, of_episode in turns.groupby("at", sort=False)}
        for at, episode in zip(of_step.index, _rows(of_step), strict=True):
            key = run.episodes["episode"][at]
            its_turns = [_turn(turn) for turn in by_episode.get(at, [])]
            note = {"note": notes[key]} if key in notes else {}
            yield Conversation({"episode": key, **_public(episode), **note}, str(results[at]), its_turns)


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    columns = {name: rounded(frame[name].to_numpy()).tolist() for name in frame.columns}
    names = list(columns)
    rows = zip(*columns.values(), strict=True)
    return [{n: _whole(n, v) for n, v in zip(names, row, strict=True) if _is_known(v)} for row in rows]


def _is_known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _whole(name: str, value: Any) -> Any:
    """Integers of the log, which are floats beside a row without one."""
    return int(value) if holds_integers(name) else value


def _turn(row: dict[str, Any]) -> dict[str, Any]:
    reason = {} if "advantage" in row else {"no_credit": REASONS[int(row["reason"])]}
    return _public(row) | reason


def _public(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in INTERNAL}


def messages(conversation: Conversation) -> list[dict[str, str]] | None:
    """The first prompt by its roles, or as one message of the user; then what the model wrote and what it got back.

    An answer to tool calls has the role ``tool``. None where the log has not all texts.
    """
    if not conversation.has_texts:
        return None
    turns = conversation.turns
    prompt = turns[0].get("prompt_tail", "") if turns else ""
    listed = chat(prompt) or ([{"role": "user", "content": prompt}] if prompt else [])
    for turn in turns:
        role = "tool" if turn.get("action", "").startswith('{"calls"') else "user"
        listed += [
            {"role": "assistant", "content": turn["response"]},
            {"role": role, "content": turn.get("observation", "")},
        ]
    return listed


def line(run: LoggedRun, conversation: Conversation) -> str:
    """An episode as a line of JSON: its columns, ``messages``, and ``turns`` with the columns that messages lack."""
    talk = messages(conversation)
    within = () if talk is None else ("response", "observation")
    turns = [{name: value for name, value in turn.items() if name not in within} for turn in conversation.turns]
    record = {"run": run.name, **conversation.episode, "outcome": conversation.outcome}
    return json.dumps(record | {"messages": talk, "turns": turns}, allow_nan=False)
