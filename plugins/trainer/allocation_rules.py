"""How many episodes of each task of a batch are played, with a fixed total.

``variance`` is the allocation of DynaMO's released code (arXiv:2602.19208): every task gets the minimum, the others are
divided by the variance of outcomes so far. ``prior`` is the sequential rule of V_0.5 (arXiv:2603.10848) turned into
one that decides before the episodes are played: another episode goes where it lowers the error of the baseline most.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

SOLVED, LEAST = 0.85, 0.01
"""DynaMO: from this share of successes on a task counts as solved and gets the smallest weight"""
FARTHEST = 4.0
"""the largest squared distance of two outcomes in [-1, 1], used for unknown tasks"""


class TaskHistory(NamedTuple):
    """The history of a task."""

    episodes: float
    """weighted number of episodes"""
    solved: float
    """their successes, with the same weights"""
    surprise: float
    """squared distance of its last successes from those before, in excess of chance: V_0.5's D2"""
    unsolved: float = 0.0
    """1: it was last played without a hint and not solved once"""


def learn(history: TaskHistory | None, solved: Sequence[float], decay: float) -> TaskHistory:
    """``history`` after another group of the task; ``solved``: the success of each episode, in [0, 1], at least one."""
    number, total = len(solved), float(sum(solved))
    unsolved = float(total == 0)
    if history is None or not history.episodes:
        return TaskHistory(number, total, FARTHEST, unsolved)
    distance = 2 * (total / number - history.solved / history.episodes)  # V_0.5's outcomes are -1 and 1
    surprise = max(0.0, distance**2 - 1 / number)
    return TaskHistory(decay * history.episodes + number, decay * history.solved + total, surprise, unsolved)


def hint_share(history: TaskHistory | None, low: float, high: float) -> float:
    """The share of its hint that a task shows: ADHint's, ``low + (high - low) * d``, d the share of failures so far.

    0 unless no episode of the last group was solved, without a hint: so every other group has no hint and shows
    whether the task still needs one.
    """
    if history is None or not history.unsolved:
        return 0.0
    return low + (high - low) * (1 - history.solved / history.episodes)


def by_variance(tasks: Sequence[TaskHistory | None], total: int, low: int, high: int) -> list[int]:
    """``low`` each, and the rest in proportion to 4 p (1 - p), p the share of successes; never above ``high``."""
    counts = np.full(len(tasks), low)
    weights = np.array([_weight(history) for history in tasks])
    while remaining := total - int(counts.sum()):
        free = np.flatnonzero(counts < high)
        shares = remaining * weights[free] / weights[free].sum()
        added = np.floor(shares).astype(int)
        largest = np.argsort(added - shares, kind="stable")  # by the rounding error
        added[largest[: remaining - added.sum()]] += 1
        counts[free] += np.minimum(added, high - counts[free])
    return counts.tolist()


def _weight(history: TaskHistory | None) -> float:
    if history is None or not history.episodes:
        return 1.0
    share = history.solved / history.episodes
    return LEAST if share >= SOLVED else max(LEAST, 4 * share * (1 - share))


def by_prior(tasks: Sequence[TaskHistory | None], total: int, low: int, high: int) -> list[int]:
    """``low`` each, and every further episode where the baseline's mean squared error D2 / (k D2 + 1) falls most.

    That is V_0.5's w^2 / k + (1 - w)^2 D2 with w = D2 / (D2 + 1 / k). Ties go to the task with fewest episodes.
    """
    counts = [low] * len(tasks)
    surprises = [FARTHEST if history is None else history.surprise for history in tasks]

    def entry(i: int) -> tuple[float, int, int]:
        k, d = counts[i], surprises[i]
        return (d / ((k + 1) * d + 1) - d / (k * d + 1), k, i)

    heap = [entry(i) for i in range(len(tasks)) if low < high]
    heapq.heapify(heap)
    for _ in range(total - low * len(tasks)):
        i = heapq.heappop(heap)[2]
        counts[i] += 1
        if counts[i] < high:
            heapq.heappush(heap, entry(i))
    return counts


RULES: dict[str, Callable[[Sequence[TaskHistory | None], int, int, int], list[int]]] = {
    "variance": by_variance,
    "prior": by_prior,
}
"""From the history of each task of a batch, the total, and the bounds per task, with ``low * tasks <= total <= high *
tasks``, to the episodes of each task."""
