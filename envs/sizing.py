"""How much of a machine environments may take: what is available to this process, in a container or not."""

from __future__ import annotations

import os
from pathlib import Path

_SHARE_OF_MEMORY = 0.5  # of what is free when a host starts; the rest is for what grows later
_CPUS_PER_HOST = 4
_MOST_HOSTS = 4
_CGROUP = Path("/sys/fs/cgroup")


def cpus() -> int:
    """CPUs that this process may use: its affinity, or its container's quota when that is less."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _words(_CGROUP / "cpu.max")
    if len(quota) == 2 and quota[0] != "max":
        count = min(count, round(int(quota[0]) / int(quota[1])))
    return max(1, count)


def free_memory_mb() -> int:
    """Memory that is available: of the machine, or of this process's container when that is less. 4096 if unknown."""
    lines = [line.split() for line in _text(Path("/proc/meminfo")).splitlines()]
    free = next((int(line[1]) // 1024 for line in lines if line[0] == "MemAvailable:"), 4096)
    for group in _cgroups():
        limit, used = _words(group / "memory.max"), _words(group / "memory.current")
        if limit and used and limit[0] != "max":
            # Files in the cache (a model's weights, just read) count as used, and go when memory is asked for.
            stat = dict(line.split() for line in _text(group / "memory.stat").splitlines())
            cache = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
            free = min(free, (int(limit[0]) - int(used[0]) + cache) >> 20)
    return max(0, free)


def _cgroups() -> list[Path]:
    """The control groups (version 2) that this process is in, the innermost first; inside a container often one."""
    line = next((line for line in _text(Path("/proc/self/cgroup")).splitlines() if line.startswith("0::")), "0::/")
    inner = _CGROUP / line[3:].lstrip("/")
    return [group for group in (inner, *inner.parents) if group.is_relative_to(_CGROUP)]


def hosts(sharers: int) -> int:
    """Host processes for one of ``sharers`` workers of this machine: one for every four of its CPUs, one to four."""
    return min(_MOST_HOSTS, max(1, cpus() // (_CPUS_PER_HOST * sharers)))


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
