"""Which processes run: what tests look at after something was killed."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:  # also when it ends while the file is read
        return False


def dead_soon(*pids: int, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(alive, pids))


async def soon(true: Callable[[], Any], seconds: float = 60.0) -> bool:
    """Whether it becomes true in this time; the event loop goes on meanwhile."""
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return bool(true())
