"""The restart budget: how much a host may lose before it is no accident any more."""

from __future__ import annotations

import time
from collections import deque

from verl_turnkey.envs.errors import EnvironmentFailure

WINDOW_SECONDS = 600.0  # a loss that is older says nothing about now
_REASONS = 3
_REASON_CHARS = 500


class Losses:
    """Counts the threads and processes lost in the last ten minutes; an episode that went well pays for one.

    Args:
        limit: losses that are allowed.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lost: deque[tuple[float, str]] = deque()  # when and why, the oldest first

    def lost(self, reason: str) -> None:
        """Count one loss."""
        self._lost.append((time.monotonic(), reason[:_REASON_CHARS]))

    def gained(self) -> None:
        """Count a success."""
        if self._lost:
            self._lost.popleft()

    def check(self) -> None:
        """Raise ``EnvironmentFailure`` (kind ``restarts``) while there are more losses than allowed."""
        oldest = time.monotonic() - WINDOW_SECONDS
        while self._lost and self._lost[0][0] < oldest:
            self._lost.popleft()
        if len(self._lost) > self._limit:
            reasons = "\n".join(f"- {reason}" for _, reason in list(self._lost)[-_REASONS:])
            raise EnvironmentFailure(
                "restarts",
                f"{len(self._lost)} environment processes or threads were lost in the last {WINDOW_SECONDS / 60:g} "
                f"minutes beyond the episodes that went well, and turnkey.env.restarts allows {self._limit}. The last "
                f"reasons:\n{reasons}",
            )
