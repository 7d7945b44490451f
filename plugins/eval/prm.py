"""``turnkey prm``: training examples for a process reward model from a trajectory log, and how good its scores are.

An example is the default question of the reward component ``judge`` about an episode up to and including a turn, and
the label as its answer. Three kinds:

- ``judge``: ``1`` or ``0``, whether the episode will be solved (GUI-Shepherd, arXiv:2509.23738), with ``binary``;
- ``progress``: the completed share of the task, ``Score: 3.3`` for a third (ProgRM, arXiv:2505.18121);
- ``pairs``: two responses to the same prompt, one with a higher label than the other.

Scores of turns (N: turns) are compared with their labels by accuracy, AUC and calibration, with bootstrap intervals.
Turns of a task resemble each other, so the bootstrap resamples tasks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_turnkey.envs.rewards.components import RewardStep
from verl_turnkey.envs.rewards.judge import JudgeReward
from verl_turnkey.envs.rewards.progress import recipe_progress
from verl_turnkey.plugins.log.schema import TABLES
from verl_turnkey.plugins.rollout.columns import SUMMARY_OF
from verl_turnkey.plugins.view.join import flag, read
from verl_turnkey.plugins.view.stats import Interval

VISITS = 3
"""fewest episodes through a state whose share of successes is a label"""
POSITIVE = 0.5
"""labels above it are positive"""
TAIL = 2000
"""characters of a later turn's prompt that the log keeps"""
QUESTIONS = {
    "judge": JudgeReward(url="http://unused", model="unused", binary=True),
    "progress": JudgeReward(url="http://unused", model="unused"),
}


@dataclass(frozen=True)
class Turn:
    """A turn of the log."""

    turn: int
    prompt: str
    """as logged: all of it for turn 0, the last :data:`TAIL` characters for later turns"""
    response: str
    action: str | None
    valid: bool
    anchor: str | None
    next_anchor: str | None
    own: bool
    """trained by this episode, not by another branch"""


@dataclass(frozen=True)
class LoggedEpisode:
    """An episode with the texts of all its turns."""

    episode: str
    group: str
    task: str
    success: bool
    steps: Sequence[RewardStep]
    turns: Sequence[Turn]


@dataclass
class Episodes:
    """The episodes for examples, and the number of episodes left out by reason."""

    episodes: list[LoggedEpisode] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def read_episodes(log: Path, *, validation: bool = False) -> Episodes:
    """The episodes of the trajectory log ``log`` with the texts of all their turns.

    Args:
        validation: read the episodes of validation instead of those of training.
    """
    tables = {
        name: read(log, name).drop_duplicates(list(TABLES[name].key), keep="last", ignore_index=True)
        for name in ("episodes", "turns", "texts")
    }
    whole = tables["turns"].merge(tables["texts"].drop(columns=["step", "segment"]), on=["episode", "turn"])
    turns = {key: rows.sort_values("turn") for key, rows in whole.groupby("episode", sort=False)}
    result = Episodes()
    episodes = tables["episodes"]
    for row in episodes[flag(episodes["validation"]) == validation].to_dict("records"):
        rows = turns.get(row["episode"])
        if row["success"] not in (True, False):
            result.left_out["failed"] += 1
        elif rows is None or len(rows) < row["turns"]:
            result.left_out["texts incomplete"] += 1
        elif not isinstance(rows["first_observation"].iloc[0], str):
            result.left_out["logged by an earlier version, without the task in words and the first observation"] += 1
        else:
            result.episodes.append(_episode(row, rows.to_dict("records")))
    return result


def _episode(row: Mapping[Any, Any], rows: Sequence[Mapping[Any, Any]]) -> LoggedEpisode:
    task = _text(rows[0]["task_text"]) or ""
    answers = ["", *(_text(turn["observation"]) or "" for turn in rows[:-1])]
    seen = [_text(turn["first_observation"]) for turn in rows]  # else the answer of the turn before
    observations = [answer if own is None else own for own, answer in zip(seen, answers, strict=True)]
    turns = [
        Turn(
            turn=int(turn["turn"]),
            prompt=_text(turn["prompt_tail"]) or "",
            response=_text(turn["response"]) or "",
            action=_text(turn["action"]),
            valid=bool(turn["valid"]),
            anchor=_text(turn["anchor"]),
            next_anchor=_text(turn["next_anchor"]),
            own=_text(turn["trained_by"]) is None,
        )
        for turn in rows
    ]
    steps = [
        RewardStep(observation, turn.action, turn.valid, text=turn.response, task=task)
        for observation, turn in zip(observations, turns, strict=True)
    ]
    group = str(row["group"])
    return LoggedEpisode(str(row["episode"]), group, _text(row["task"]) or group, bool(row["success"]), steps, turns)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


# --- labels: episode and turn -> a number from 0 to 1 ---------------------------------------------------------------

Label = dict[tuple[str, int], float]


def outcome_labels(episodes: Sequence[LoggedEpisode]) -> Label:
    """1 for every turn of a solved episode, else 0."""
    return {(e.episode, turn.turn): float(e.success) for e in episodes for turn in e.turns}


def state_labels(episodes: Sequence[LoggedEpisode], visits: int = VISITS) -> Label:
    """For each turn, the state that it led to, and the share of solved episodes among the group's episodes through it.

    The state is the turn's ``next_anchor``, or the next turn's ``anchor``. If it is unknown, or fewer than ``visits``
    episodes passed through it, the label is the outcome of the turn's own episode.
    """
    through: dict[tuple[str, str], dict[str, bool]] = defaultdict(dict)
    for e in episodes:
        for state in {*(turn.anchor for turn in e.turns), *_led_to(e)} - {None}:
            through[e.group, str(state)][e.episode] = e.success
    labels = {}
    for e in episodes:
        for turn, state in zip(e.turns, _led_to(e), strict=True):
            outcomes = list(through.get((e.group, state or ""), {}).values())
            known = state is not None and len(outcomes) >= visits
            labels[e.episode, turn.turn] = sum(outcomes) / len(outcomes) if known else float(e.success)
    return labels


def _led_to(episode: LoggedEpisode) -> list[str | None]:
    following = [*(turn.anchor for turn in episode.turns[1:]), None]
    return [turn.next_anchor or anchor for turn, anchor in zip(episode.turns, following, strict=True)]


def progress_labels(episodes: Sequence[LoggedEpisode]) -> Label:
    """After each turn, the share of the actions of the task's shortest success that were done, in order.

    A refused action is not done. Of several shortest successes, the one with the largest share counts. Turns of a task
    that no episode solved have no label. ProgRM finds recipes by clusters of successes, which are not published in
    detail.
    """
    recipes: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for e in episodes:
        if e.success and (done := tuple(filter(None, _done(e)))):
            recipes[e.task].append(done)
    labels = {}
    for e in episodes:
        shortest = min(map(len, recipes[e.task]), default=0)
        paths = [
            recipe_progress(_done(e), recipe)[1:]
            for recipe in dict.fromkeys(recipes[e.task])
            if len(recipe) == shortest
        ]
        labels |= {(e.episode, turn.turn): max(path[k] for path in paths) for k, turn in enumerate(e.turns) if paths}
    return labels


def _done(episode: LoggedEpisode) -> list[str | None]:
    """The action of each turn; None: the environment did not take one."""
    acted = (turn.valid and not (turn.anchor or "").startswith(SUMMARY_OF) for turn in episode.turns)
    return [turn.action if done else None for turn, done in zip(episode.turns, acted, strict=True)]


def column_labels(file: Path) -> Label:
    """Labels by a person or a judge: the columns ``episode``, ``turn`` and ``label`` of a parquet file.

    Raises:
        ValueError: a column is missing, or a label is not within 0 and 1.
    """
    import pandas as pd

    rows = pd.read_parquet(file)
    if missing := {"episode", "turn", "label"} - {*rows.columns}:
        raise ValueError(f"{file} lacks {', '.join(sorted(missing))}: expected the columns episode, turn and label")
    rows = rows.dropna(subset=["label"])
    if not rows["label"].between(0, 1).all():
        raise ValueError(f"{file}: expected labels from 0 to 1, got {rows['label'].min()} to {rows['label'].max()}")
    return {(str(e), int(t)): float(y) for e, t, y in rows[["episode", "turn", "label"]].itertuples(index=False)}


# --- examples -------------------------------------------------------------------------------------------------------


def scored(episodes: Sequence[LoggedEpisode], labels: Label, kind: str, max_chars: int) -> Iterator[dict[str, Any]]:
    """A row per labelled turn: ``messages``, ``label``, ``episode``, ``turn``, ``task``, ``success``.

    ``max_chars``: see the component ``judge``.
    """
    question = replace(QUESTIONS[kind], max_chars=max_chars)
    for e in episodes:
        for k, turn in enumerate(e.turns):
            label = labels.get((e.episode, turn.turn))
            if label is None or not turn.own:
                continue
            answer = f"Score: {10 * label:.3g}" if kind == "progress" else str(int(label > POSITIVE))
            messages = [*question.messages(e.steps[: k + 1]), {"role": "assistant", "content": answer}]
            about = {"episode": e.episode, "turn": turn.turn, "task": e.task, "success": e.success}
            yield {"messages": messages, "label": label, **about}


def pairs(episodes: Sequence[LoggedEpisode], labels: Label) -> Iterator[dict[str, Any]]:
    """The responses with the highest and the lowest label, for each prompt of a group whose labels differ.

    Rows have ``prompt`` (text, with the chat template's markup), ``chosen``, ``rejected``, ``margin`` (difference of
    the labels), ``episode`` and ``turn`` of the chosen response, and ``task``. A later turn whose prompt was cut in the
    log is in no pair.
    """
    same: dict[tuple[str, str], list[tuple[float, str, LoggedEpisode, int]]] = defaultdict(list)
    for e in episodes:
        for turn in e.turns:
            label = labels.get((e.episode, turn.turn))
            if label is not None and turn.own and (turn.turn == 0 or len(turn.prompt) < TAIL):
                same[e.group, turn.prompt].append((label, turn.response, e, turn.turn))
    for (_, prompt), answers in same.items():
        best, worst = max(answers, key=lambda a: a[0]), min(answers, key=lambda a: a[0])
        if best[0] > worst[0] and best[1] != worst[1]:
            row = {"prompt": prompt, "chosen": best[1], "rejected": worst[1], "margin": best[0] - worst[0]}
            yield row | {"episode": best[2].episode, "turn": best[3], "task": best[2].task}


def split(rows: Sequence[dict[str, Any]], share: float) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows, and rows of held-out tasks: about ``share`` of the tasks, selected by a hash of the task."""
    tasks = sorted({row["task"] for row in rows}, key=lambda task: hashlib.sha256(task.encode()).digest())
    held_out = {*tasks[: max(1, round(share * len(tasks)))]} if share and len(tasks) > 1 else set()
    return [row for row in rows if row["task"] not in held_out], [row for row in rows if row["task"] in held_out]


def balance(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Equal numbers of positive and negative examples; the larger class keeps those with the lowest hash."""
    classes = [[row for row in rows if (row["label"] > POSITIVE) is positive] for positive in (True, False)]

    def lot(row: Mapping[str, Any]) -> bytes:
        return hashlib.sha256(json.dumps([row["episode"], row["turn"]]).encode()).digest()

    number = min(map(len, classes))
    return [row for of_class in classes for row in sorted(of_class, key=lot)[:number]]


Floats = NDArray[np.float64]
RESAMPLES = 1000
BINS = 10
EPS = 1e-6
"""scores are clipped to this distance from 0 and 1 in the cross entropy"""
MEASURES = ("accuracy", "auc", "cross_entropy", "squared_error", "calibration_error")


def measure(scores: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> dict[str, float]:
    """The :data:`MEASURES` of scores against labels, (N,) each, from 0 to 1; nan for an undefined measure.

    ``accuracy``: score and label are both above 1/2, or both not. ``auc``: probability that a turn with a label above
    1/2 has a higher score than one without; ties count half. ``cross_entropy``: in nats, GUI-Shepherd's loss of the
    label token. ``squared_error``: the Brier score. ``calibration_error``: mean distance of score and label over ten
    bins of scores.

    Args:
        weights: (N,) how often each turn counts.
    """
    s, y = np.asarray(scores, np.float64), np.asarray(labels, np.float64)
    w = np.ones_like(s) if weights is None else np.asarray(weights, np.float64)
    total = w.sum()
    p = s.clip(EPS, 1 - EPS)
    bins = _bins(s)
    gaps = np.abs(np.bincount(bins, w * (s - y), BINS))
    return {
        "accuracy": float((w * ((s > 0.5) == (y > 0.5))).sum() / total),
        "auc": auc(s, y > 0.5, w),
        "cross_entropy": float(-(w * (y * np.log(p) + (1 - y) * np.log(1 - p))).sum() / total),
        "squared_error": float((w * (s - y) ** 2).sum() / total),
        "calibration_error": float(gaps.sum() / total),
    }


def auc(scores: Floats, positive: NDArray[np.bool_], weights: Floats) -> float:
    """Area under the ROC curve, (N,) each; nan if one class is absent."""
    _, place = np.unique(scores, return_inverse=True)
    of_positives = np.bincount(place, weights * positive)
    of_negatives = np.bincount(place, weights * ~positive)
    number = of_positives.sum() * of_negatives.sum()
    below = np.cumsum(of_negatives) - of_negatives / 2
    return float((of_positives * below).sum() / number) if number else math.nan


def calibration(scores: ArrayLike, labels: ArrayLike) -> list[tuple[int, float, float]]:
    """Number of turns, mean score and mean label of each bin of scores that is not empty."""
    s, y = np.asarray(scores, np.float64), np.asarray(labels, np.float64)
    bins = _bins(s)
    return [(int((bins == b).sum()), float(s[bins == b].mean()), float(y[bins == b].mean())) for b in np.unique(bins)]


def _bins(scores: Floats) -> NDArray[np.intp]:
    return np.minimum(scores * BINS, BINS - 1).astype(np.intp)


def resamples(tasks: Sequence[str], seed: int = 0) -> Iterator[Floats]:
    """Bootstrap over tasks: how often each turn counts, (N,), in each of :data:`RESAMPLES` draws.

    ``tasks``: the task of each turn, (N,).
    """
    _, of_turn = np.unique(np.asarray(tasks, str), return_inverse=True)
    rng, number = np.random.default_rng(seed), int(of_turn.max()) + 1
    for _ in range(RESAMPLES):
        yield np.bincount(rng.integers(number, size=number), minlength=number)[of_turn].astype(np.float64)


def evaluate(
    scores: ArrayLike, labels: ArrayLike, tasks: Sequence[str], *, confidence: float = 0.95, seed: int = 0
) -> Mapping[str, Interval]:
    """:func:`measure` with percentile intervals over tasks; ``tasks``: of each turn, (N,).

    Raises:
        ValueError: no turn, or a score outside of 0 and 1.
    """
    s, y = np.asarray(scores, np.float64), np.asarray(labels, np.float64)
    if not s.size or not np.all((s >= 0) & (s <= 1)):
        raise ValueError(f"expected scores from 0 to 1 of at least one turn, got {s.tolist()[:5]}")
    measured = measure(s, y)
    drawn = [measure(s, y, weights) for weights in resamples(tasks, seed)]
    tails = (0.5 - confidence / 2, 0.5 + confidence / 2)
    result = {}
    for name in MEASURES:
        finite = [values[name] for values in drawn if math.isfinite(values[name])]
        low, high = np.quantile(finite, tails) if finite else (math.nan, math.nan)
        result[name] = Interval(measured[name], float(low), float(high))
    return result
