"""Stores episodes and groups of earlier steps, and selects those that are trained again (R^3, SSB)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Stored:
    """An episode of an earlier step."""

    step: int
    """in which it was first trained"""
    rows: Sequence[Mapping[str, Any]]
    """the fields of verl's queue of each of its rows"""
    tags: Sequence[Mapping[str, Any]]
    """of the rows in verl's queue"""


@dataclass
class _Task:
    ends: dict[bool, list[Stored]] = field(default_factory=lambda: {True: [], False: []})
    """its solved and its unsolved episodes, the newest last"""


class Memory:
    """The newest solved and the newest unsolved episodes of the tasks that were played last.

    Args:
        outcomes: most solved episodes of a task, and most unsolved ones.
        tasks: most tasks; the least recently played one is dropped first.
        age: steps after which an episode is dropped.
    """

    def __init__(self, outcomes: int, tasks: int, age: int) -> None:
        self._outcomes, self._most, self._age = outcomes, tasks, age
        self._tasks: OrderedDict[str, _Task] = OrderedDict()

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self._tasks)

    def learn(self, task: str, solved: Sequence[Stored], unsolved: Sequence[Stored]) -> None:
        """Store episodes of ``task``, the newest last."""
        history = self._tasks.setdefault(task, _Task())
        self._tasks.move_to_end(task)
        for end, played in ((True, solved), (False, unsolved)):
            history.ends[end] = [*history.ends[end], *played][-self._outcomes :]
        while len(self._tasks) > self._most:
            self._tasks.popitem(last=False)

    def take(self, task: str, solved: bool, step: int) -> list[Stored]:
        """Stored episodes of ``task`` from before ``step`` with this outcome that are not too old; they stay stored."""
        history = self._tasks.get(task)
        return (
            []
            if history is None
            else [episode for episode in history.ends[solved] if episode.step < step <= episode.step + self._age]
        )

    def forget(self, step: int) -> None:
        """Drop what is too old at ``step``."""
        for task, history in list(self._tasks.items()):
            history.ends = {
                end: [episode for episode in ends if step <= episode.step + self._age]
                for end, ends in history.ends.items()
            }
            if not any(history.ends.values()):
                del self._tasks[task]


@dataclass(frozen=True)
class StoredGroup:
    """The episodes of a group whose rewards differ."""

    name: str
    spread: float
    """standard deviation of the rewards, positive"""
    episodes: Sequence[Stored]

    @property
    def step(self) -> int:
        """The step in which it was first trained."""
        return self.episodes[0].step


class Buffer:
    """The newest groups whose rewards differ (Skywork R1V2's selective sample buffer).

    Args:
        size: most groups; the oldest is dropped first.
        age: steps after which a group is dropped.
        seed: of the draws.
    """

    def __init__(self, size: int, age: int, seed: int) -> None:
        self._size, self._age, self._seed = size, age, abs(seed)
        self._groups: list[StoredGroup] = []

    def __len__(self) -> int:
        """Number of groups."""
        return len(self._groups)

    def learn(self, groups: Sequence[StoredGroup]) -> None:
        """Store the groups of a step."""
        self._groups = [*self._groups, *groups][-self._size :]

    def draw(self, number: int, step: int, update: int = 0) -> list[StoredGroup]:
        """At most ``number`` groups of steps before ``step``, the larger their spread the more likely, oldest first.

        They are removed, so that none is trained a third time. ``update``: its number in the step.
        """
        eligible = [i for i, group in enumerate(self._groups) if group.step < step]
        if not eligible or not number:
            return []
        weights = np.array([self._groups[i].spread for i in eligible])
        rng = np.random.default_rng((self._seed, step, update))
        drawn = set(rng.choice(eligible, min(number, len(eligible)), replace=False, p=weights / weights.sum()).tolist())
        chosen = [self._groups[i] for i in sorted(drawn)]
        self._groups = [group for i, group in enumerate(self._groups) if i not in drawn]
        return chosen

    def forget(self, step: int) -> None:
        """Drop what is too old at ``step``."""
        self._groups = [group for group in self._groups if step <= group.step + self._age]


def all_ended(solved: Sequence[float]) -> bool | None:
    """True if all episodes of a group were solved, False if none was; None if they differ or there are none."""
    if solved and min(solved) >= 1:
        return True
    return False if solved and max(solved) <= 0 else None
