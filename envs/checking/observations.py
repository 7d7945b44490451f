"""What a check observed of an environment, and the measures that follow from it; it judges nothing."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.checking.traces import Trace

Status = Literal["pass", "warn", "fail", "skip"]
Verdict = tuple[Status, str]
"""a status and the evidence"""


@dataclass(frozen=True)
class Limits:
    """Seconds that a call may take, as in ``turnkey.env.step_timeout`` and ``turnkey.env.reset_timeout``."""

    step: float = 30.0
    reset: float = 120.0


@dataclass(frozen=True)
class Probe:
    """A meaningless action right after a step that earned ``last`` (0 at the start)."""

    last: float
    reward: float
    usable: bool
    """it changed nothing and the episode went on"""


@dataclass
class Record:
    """Everything observed; filled field by field, so that a process that dies leaves what it had recorded."""

    thread_safe: bool = False
    declared_memory_mb: float | None = None
    first: list[Trace] = field(default_factory=list)
    """one episode per seed, each the first of a new instance"""
    fresh: list[Trace] = field(default_factory=list)
    """the same actions on further new instances"""
    group: list[Trace] = field(default_factory=list)
    """further rollouts of the same seeds, all on one instance"""
    texts: list[Trace] = field(default_factory=list)
    oracle: list[Trace] = field(default_factory=list)
    long: list[Trace] = field(default_factory=list)
    """an episode played to its end, if no other reached its end"""
    reused: list[Trace] = field(default_factory=list)
    """the actions of ``first`` once more, on the instance that played everything else"""
    elsewhere: dict[str, list[Trace]] = field(default_factory=dict)
    """the actions of ``first`` in other processes"""
    clones: tuple[str, list[Trace]] = ("", [])
    """how they were made; the actions of ``first`` on a clone made half-way and on what it was made from, in turn"""
    threads: list[Trace] | None = None
    probes: list[Probe] = field(default_factory=list)
    after_end: str | None = None
    """the result of a step after the end; empty: an exception, as it should be"""
    global_rng: dict[str, str] = field(default_factory=dict)
    """generator: the call that changed its state"""
    printed: str = ""
    gymnasium: tuple[str, str] | None = None
    """what gymnasium's checker said, and what it said because of the declared spaces alone; empty: nothing"""
    memory_mb: list[float] = field(default_factory=list)
    """resident, of the process and its children with one, two, ... instances"""
    faults: list[tuple[str, str]] = field(default_factory=list)
    complete: bool = False
    making: list[float] = field(default_factory=list)
    """seconds of making each instance"""

    def traces(self) -> list[Trace]:
        """All episodes that were played in one process, but for the threads'."""
        return [*self.first, *self.fresh, *self.group, *self.texts, *self.oracle, *self.long, *self.reused]

    def answers(self) -> list[Answer]:
        """All answers in ``traces``."""
        return [answer for trace in self.traces() for answer in trace.answers]

    def played(self) -> list[Trace]:
        """Episodes of sensible actions, each once."""
        return [trace for trace in (*self.first, *self.group, *self.oracle) if trace.answers]

    def groups(self) -> list[list[Trace]]:
        """The rollouts of each seed."""
        by_seed: dict[int, list[Trace]] = defaultdict(list)
        for trace in (*self.first, *self.group):
            by_seed[trace.seed].append(trace)
        return list(by_seed.values())

    def anchor_rate(self, key: Callable[[Answer], object], start: bool = True) -> float:
        """Share of the steps taken in a state that two or more rollouts of the group were in; nan without rollouts."""
        shared = total = 0
        for rollouts in self.groups():
            # No action is taken after the last answer.
            seen = [[key(answer) for answer in trace.answers[0 if start else 1 : -1]] for trace in rollouts]
            rollouts_with = Counter(state for states in seen for state in set(states))
            total += sum(map(len, seen))
            shared += sum(rollouts_with[state] > 1 for states in seen for state in states)
        return shared / total if total else math.nan

    def comes_back(self, key: Callable[[Answer], object]) -> bool:
        """Does anything occur at two different steps of a group?"""
        for rollouts in self.groups():
            steps: dict[object, int] = {}
            for trace in rollouts:
                if any(steps.setdefault(key(answer), t) != t for t, answer in enumerate(trace.answers)):
                    return True
        return False

    def memory_of_one(self) -> float:
        """What one instance takes: added to the process when thread-safe, else the whole process; nan: not measured."""
        if not self.memory_mb:
            return math.nan
        if not self.thread_safe:
            return self.memory_mb[0]
        further = len(self.memory_mb) - 1
        return (self.memory_mb[-1] - self.memory_mb[0]) / further if further else math.nan


def seconds(traces: Iterable[Trace]) -> tuple[list[float], list[float]]:
    """Seconds of every reset and of every step."""
    traces = list(traces)
    resets = [trace.seconds[0] for trace in traces if trace.seconds]
    return resets, [took for trace in traces for took in trace.seconds[1:]]
