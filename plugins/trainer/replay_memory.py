"""Which episodes of earlier steps are remembered of each task, and which of them join a group (R^3)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Stored:
    """An episode of an earlier step."""

    step: int
    """in which it was played and trained"""
    rows: Sequence[Mapping[str, Any]]
    """the fields of verl's queue of each of its rows"""
    tags: Sequence[Mapping[str, Any]]
    """of the rows in verl's queue"""


@dataclass
class _Task:
    ends: dict[bool, list[Stored]] = field(default_factory=lambda: {True: [], False: []})
    """the solved and the unsolved ones, the newest last"""


class Memory:
    """The newest solved and the newest unsolved episodes of the tasks that were played last.

    Args:
        each: most solved episodes of a task, and most unsolved ones.
        tasks: most tasks; the one that was played least recently is forgotten first.
        age: steps after which an episode is forgotten.
    """

    def __init__(self, each: int, tasks: int, age: int) -> None:
        self._each, self._most, self._age = each, tasks, age
        self._tasks: OrderedDict[str, _Task] = OrderedDict()

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self._tasks)

    def learn(self, task: str, solved: Sequence[Stored], unsolved: Sequence[Stored]) -> None:
        """Remember what was played of ``task``, the newest last."""
        seen = self._tasks.setdefault(task, _Task())
        self._tasks.move_to_end(task)
        for end, played in ((True, solved), (False, unsolved)):
            seen.ends[end] = [*seen.ends[end], *played][-self._each :]
        while len(self._tasks) > self._most:
            self._tasks.popitem(last=False)

    def take(self, task: str, solved: bool, step: int) -> list[Stored]:
        """The stored episodes of ``task`` that ended so and are not too old in ``step``; they stay stored."""
        seen = self._tasks.get(task)
        return [] if seen is None else [one for one in seen.ends[solved] if step - one.step <= self._age]

    def forget(self, step: int) -> None:
        """Drop what will be too old from ``step`` on."""
        for task, seen in list(self._tasks.items()):
            seen.ends = {end: self.take(task, end, step) for end in seen.ends}
            if not any(seen.ends.values()):
                del self._tasks[task]


def all_ended(solved: Sequence[float]) -> bool | None:
    """True if all episodes of a group were solved, False if none was at all; None if they differ, or without any."""
    if solved and min(solved) >= 1:
        return True
    return False if solved and max(solved) <= 0 else None
