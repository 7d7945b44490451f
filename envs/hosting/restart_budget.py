"""The restart budget: how many threads and processes a host may lose before it stops opening episodes."""

from __future__ import annotations

import time
from collections import deque

from verl_turnkey.envs.errors import EnvironmentFailure

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
