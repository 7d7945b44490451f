"""The room of a host: CPUs and memory of this machine or container, who may take them, and what its environments took.

Episodes are admitted first come, first served, as long as there is room, and while the host has not lost more threads
and processes than its restart budget allows.
"""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting.runner import Declared

_SHARE_OF_MEMORY = 0.5  # of the memory that is free when a host starts; the rest is for what grows later
_KEPT_FREE = 0.1  # of all memory: with less free, idle environments are closed
_CPUS_PER_HOST = 4
_MAX_HOSTS = 4
_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def cpus() -> int:
    """CPUs that this process may use: its affinity, or its container's quota when that is less."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in _groups("cpu"):
        old = _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        quota = _words(group / "cpu.max") or old
        if len(quota) == 2 and quota[0] not in ("max", "-1"):
            count = min(count, round(int(quota[0]) / int(quota[1])))
    return max(1, count)


def free_memory_mb() -> int:
    """Memory that is available: of the machine, or of this process's container when that is less. 4096 if unknown."""
    return max(0, min((free for _, free in _memory_mb()), default=4096))


def lacking_memory_mb() -> int:
    """Memory to free until a tenth is free, of the machine's memory and of the container's."""
    return max(
        (round(_KEPT_FREE * whole) - free for whole, free in _memory_mb() if free < _KEPT_FREE * whole), default=0
    )


def _memory_mb() -> list[tuple[int, int]]:
    """Total and free memory of the machine, and of each control group with a limit."""
    lines = {line[0]: int(line[1]) // 1024 for line in map(str.split, _text(Path("/proc/meminfo")).splitlines())}
    amounts = [(lines["MemTotal:"], lines["MemAvailable:"])] if {"MemTotal:", "MemAvailable:"} <= lines.keys() else []
    for group in _groups("memory"):
        limit = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
        used = _words(group / "memory.current") or _words(group / "memory.usage_in_bytes")
        if limit and used and limit[0] != "max":
            # The page cache (such as weights just read) counts as used, but is freed when memory is needed.
            stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
            names = ("inactive_file", "active_file")  # version 1 has the sums over its children beside its own
            cache = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in names)
            amounts.append((int(limit[0]) >> 20, (int(limit[0]) - int(used[0]) + cache) >> 20))
    return amounts


def _groups(controller: str) -> list[Path]:
    """The control groups that may limit this process, of versions 2 and 1; inside a container often the root alone."""
    groups = []
    for line in (_text(_MEMBERSHIP) or "0::/").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUP / controller if controllers else _CGROUP  # version 2 has one tree for all of them
        inner = root / path.lstrip("/")
        groups += [group for group in (inner, *inner.parents) if group.is_relative_to(root)]
    return groups


def hosts(sharers: int) -> int:
    """Host processes for one of ``sharers`` workers of this machine: one for every four of its CPUs, one to four."""
    return min(_MAX_HOSTS, max(1, cpus() // (_CPUS_PER_HOST * sharers)))


def memory_for_a_host_mb(sharers: int) -> int:
    """Memory for the environments of one of ``sharers`` hosts of this machine: its part of half of what is free."""
    return int(free_memory_mb() * _SHARE_OF_MEMORY / sharers)


def calls_at_once(sharers: int) -> int:
    """Environment calls at the same time in one of ``sharers`` hosts: more than CPUs, since some calls only wait."""
    return max(8, 4 * cpus() // sharers)


def starts_at_once(sharers: int) -> int:
    """Processes that one of ``sharers`` hosts starts at the same time: importing takes a CPU each."""
    return max(1, cpus() // sharers)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return ""


def _words(path: Path) -> list[str]:
    return _text(path).split()


WINDOW_SECONDS = 600.0  # older losses do not count
_REASONS = 3
_REASON_CHARS = 500


class RestartBudget:
    """Counts the threads and processes lost in the last ten minutes; an episode without failure takes one off.

    Args:
        limit: losses that are allowed.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._losses: deque[tuple[float, str]] = deque()  # when and why, the oldest first

    def spend(self, reason: str) -> None:
        """Count a lost thread or process."""
        self._losses.append((time.monotonic(), reason[:_REASON_CHARS]))

    def refund(self) -> None:
        """Take the oldest loss off the count, for an episode that ended without failure."""
        if self._losses:
            self._losses.popleft()

    def check(self) -> None:
        """Raise ``EnvironmentFailure`` (kind ``restarts``) while there are more losses than allowed."""
        oldest = time.monotonic() - WINDOW_SECONDS
        while self._losses and self._losses[0][0] < oldest:
            self._losses.popleft()
        if len(self._losses) > self._limit:
            reasons = "\n".join(f"- {reason}" for _, reason in list(self._losses)[-_REASONS:])
            raise EnvironmentFailure(
                "restarts",
                f"{len(self._losses)} environment processes or threads were lost in the last {WINDOW_SECONDS / 60:g} "
                f"minutes beyond the episodes that went well, and turnkey.env.restarts allows {self._limit}. The last "
                f"reasons:\n{reasons}",
            )


MOST = 20_000  # durations that are kept of each kind between two readings: the latest


class Measures:
    """Counts and durations since the last reading. To be used from one event loop."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {"step": deque(maxlen=MOST), "reset": deque(maxlen=MOST)}
        self.in_flight = 0
        """calls of environments that run now"""
        self.lost = 0
        """threads and processes that were killed at a deadline or died, since the last reading"""

    @contextmanager
    def timed(self, kind: str) -> Iterator[None]:
        """Measure a call of ``kind``: step, reset, or another one, whose duration is not kept."""
        self.in_flight += 1
        began = time.perf_counter()
        try:
            yield
        finally:
            self.in_flight -= 1
            if kind in self._seconds:
                self._seconds[kind].append(time.perf_counter() - began)

    def take(self) -> dict[str, Any]:
        """What was measured since the last reading: ``step`` and ``reset`` in seconds, ``in_flight`` and ``lost``."""
        taken = {kind: array("f", seconds) for kind, seconds in self._seconds.items()}
        lost, self.lost = self.lost, 0
        for seconds in self._seconds.values():
            seconds.clear()
        return {**taken, "in_flight": self.in_flight, "lost": lost}


class Admission:
    """The capacity of a host, in episodes or in MB of memory, and the queue for it.

    Args:
        places: open episodes at most; ``auto``: as many as fit into the host's part of the free memory.
        sharers: hosts that share this machine's memory, this one included.
        budget: the host's restart budget; nothing is admitted while it is exceeded.
        clones: the most clones that one episode has open at the same time; ``auto`` leaves room for them.
    """

    def __init__(self, places: int | Literal["auto"], sharers: int, budget: RestartBudget, clones: int = 0) -> None:
        if places != "auto" and places < 1:
            raise ValueError(f"places must be auto or positive, not {places}")
        self._counting = places != "auto"
        self._room = memory_for_a_host_mb(sharers) // (1 + clones) if places == "auto" else places
        self._counted = not self._counting and clones > 0  # clones, with the episode that they are of
        self._budget = budget
        self._taken = 0  # by open episodes; idle environments use what is left
        self._waiting: deque[tuple[str, asyncio.Future[int]]] = deque()
        self._asking: set[str] = set()  # ids whose first episode is reading what the class declares
        self.declared: dict[str, Declared] = {}

    @property
    def waiting(self) -> int:
        """Number of episodes in the queue."""
        return sum(not grant.done() for _, grant in self._waiting)

    async def admit(self, env_id: str) -> int:
        """Wait for room for one more environment. Returns the room it takes, its cost.

        Raises:
            EnvironmentFailure: of kind ``restarts``: the restart budget was exceeded before or while this one waited.
        """
        self._budget.check()
        grant: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.append((env_id, grant))
        self._admit_waiting()
        try:
            cost = await grant
            self._budget.check()
        except BaseException:
            if grant.done() and not grant.cancelled():  # admitted and cancelled at the same moment
                self.leave(env_id, grant.result())
            self._admit_waiting()  # those behind this one
            raise
        return cost

    def take(self, env_id: str) -> int:
        """Take room for a clone without waiting, even when there is none left. Returns the cost."""
        cost = 0 if self._counted else self._cost(env_id)
        self._taken += cost
        return cost

    def settle(self, env_id: str, cost: int) -> int:
        """The cost of an environment now that its declaration is known; admits episodes that waited for it."""
        settled = self._cost(env_id) if cost else 0
        self.leave(env_id, cost - settled)
        return settled

    def leave(self, env_id: str, cost: int) -> None:
        """Give room back. If this episode was reading what the class declares, the next one may do so."""
        self._taken -= cost
        self._asking.discard(env_id)
        self._admit_waiting()

    def is_exceeded_by(self, idle: int) -> bool:
        """Whether there is not enough room for the open episodes and ``idle`` more."""
        return self._taken + idle > self._room

    def _admit_waiting(self) -> None:
        while self._waiting:
            env_id, grant = self._waiting[0]
            if not grant.cancelled():
                unknown = not self._counting and env_id not in self.declared
                if unknown and env_id in self._asking:  # the first episode reads the declaration, the others wait
                    return
                cost = self._cost(env_id)
                if self._taken and self._taken + cost > self._room:  # a single environment may exceed the room
                    return
                self._taken += cost
                if unknown:
                    self._asking.add(env_id)
                grant.set_result(cost)
            self._waiting.popleft()

    def _cost(self, env_id: str) -> int:
        return 1 if self._counting else self.declared.get(env_id, Declared()).memory_mb
