"""The CPUs and the memory that environments may take: those available to this process, in a container or not."""

from __future__ import annotations

import os
from pathlib import Path

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
