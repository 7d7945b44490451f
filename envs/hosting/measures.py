"""What a host measures of its environments: how long their calls take, and how many threads and processes it lost."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
