"""The restart budget: how much may be lost before it is no accident any more."""

from __future__ import annotations

from collections import deque

from verl_turnkey.envs.errors import EnvironmentFailure

_REASONS = 3
_REASON_CHARS = 500


class Losses:
    """Counts what was lost; what went well pays it back.

    Args:
        what: what can be lost, in words.
        limit: losses more than successes that are allowed.
    """

    def __init__(self, what: str, limit: int) -> None:
        self._what, self._limit = what, limit
        self._count = 0
        self._reasons: deque[str] = deque(maxlen=_REASONS)

    def lost(self, reason: str) -> None:
        """Count one loss. Raises ``EnvironmentFailure`` (kind ``restarts``) when it is one too many."""
        self._count += 1
        self._reasons.append(reason[:_REASON_CHARS])
        self.check()

    def gained(self) -> None:
        """Count a success."""
        self._count = max(0, self._count - 1)

    def check(self) -> None:
        """Raise ``EnvironmentFailure`` when the budget is used up."""
        if self._count > self._limit:
            reasons = "\n".join(f"- {reason}" for reason in self._reasons)
            raise EnvironmentFailure(
                "restarts",
                f"{self._count} {self._what} were lost beyond the episodes that went well, and turnkey.env.restarts "
                f"allows {self._limit}: no more are started. The last reasons:\n{reasons}",
            )
