"""Signals of trouble in an episode, by rules and without a model: Signals, arXiv:2604.00356, and its released port.

The port reads tool calls and what users write. Of its signals, those of the execution and of the environment can be
told from the turns of an episode, and they are here. A call that is made again counts if the state is the same as well:
an agent that goes forward three times does nothing wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from verl_turnkey.advantage.group_ops import next_values
from verl_turnkey.plugins.credit.rows import Rows

REPEATS, CYCLES = 3, 3
"""turns in a row with the same call that are a loop; rounds of two calls in turn that are one"""
START, FAILURE, LOOP, EXHAUSTION = 50.0, 8.0, 5.0, 3.0
"""where the score of an episode starts, and what each signal takes from it"""


class Signals(NamedTuple):
    """Of one episode."""

    failures: int
    """turns without a valid action"""
    loops: int
    """stretches of turns that repeat a call, or two calls in turn"""
    exhausted: bool
    """a limit ended it"""

    @property
    def score(self) -> float:
        return max(0.0, START - FAILURE * self.failures - LOOP * self.loops - EXHAUSTION * self.exhausted)


def signals(calls: Sequence[int], valid: Sequence[bool], exhausted: bool) -> Signals:
    """``calls``: for each turn a number, equal where state and action are the same."""
    return Signals(len(valid) - sum(valid), _repeated(calls) + _alternated(calls), bool(exhausted))


def _repeated(calls: Sequence[int]) -> int:
    return _stretches([a == b for a, b in pairwise(calls)], REPEATS - 1)


def _alternated(calls: Sequence[int]) -> int:
    back = [calls[t] == calls[t - 2] != calls[t - 1] for t in range(2, len(calls))]
    return _stretches(back, 2 * CYCLES - 2)


def _stretches(marks: Sequence[bool], least: int) -> int:
    """How many stretches of at least ``least`` marks in a row there are."""
    count = length = 0
    for mark in marks:
        length = length + 1 if mark else 0
        count += length == least
    return count


def signal_metrics(rows: Rows) -> dict[str, float]:
    """Means over the played episodes; none where the rows do not say which actions were taken.

    Of a rollout that forked its first trajectory counts alone.
    """
    steps, first = rows.steps, np.flatnonzero(rows.branch == 0)
    if "action" not in steps.given or not len(first):
        return {}
    pairs = np.stack([steps.anchor if "anchor" in steps.given else np.zeros_like(steps.action), steps.action], axis=1)
    calls = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
    following = next_values(np.arange(len(steps)), steps.runs, -1).tolist()
    begins = np.setdiff1d(first, following)
    per_episode = dict.fromkeys(steps.trajectory[begins].tolist(), Signals(0, 0, False))
    for row in begins.tolist():  # of a tree of steps each way from a step that no other goes on to
        way = [row]
        while (row := following[row]) >= 0:
            way.append(row)
        seen = signals(calls[way].tolist(), steps.valid[way].tolist(), bool(steps.truncated[way].any()))
        number = int(steps.trajectory[way[0]])
        whole = per_episode[number]
        failures, loops = whole.failures + seen.failures, whole.loops + seen.loops
        per_episode[number] = Signals(failures, loops, whole.exhausted or seen.exhausted)
    episodes = list(per_episode.values())
    return {
        "episode/signals/failures": float(np.mean([episode.failures for episode in episodes])),
        "episode/signals/loops": float(np.mean([episode.loops for episode in episodes])),
        "episode/signals/exhausted": float(np.mean([episode.exhausted for episode in episodes])),
        "episode/signals/share": float(np.mean([any(episode) for episode in episodes])),
        "episode/signals/score": float(np.mean([episode.score for episode in episodes])),
    }
