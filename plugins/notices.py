"""Console messages of a run: the package's logger, and one line per new kind of failure.

The logger has its own level and console handler, so warnings of this package appear under settings that silence all
others (``+turnkey/device=cpu``, a root logger at ERROR, or verl's handler there at that level).
"""

from __future__ import annotations

import logging
import re
import sys
from collections import Counter


class _Console(logging.Handler):
    """Prints the records that every handler of the root logger drops, so that none appears twice."""

    def emit(self, record: logging.LogRecord) -> None:
        if not any(handler.level <= record.levelno for handler in logging.getLogger().handlers):
            print(f"{record.levelname}:{record.name}:{record.getMessage()}", file=sys.stderr, flush=True)


logger = logging.getLogger("verl_turnkey")
if logger.level == logging.NOTSET:  # else the user set it
    logger.setLevel(logging.WARNING)
logger.addHandler(_Console())

MOST_WARNINGS = 100
"""most distinct texts that :func:`warn_once` logs in a process"""

_KIND = re.compile(r"^(?:\w+: )?environment failure \((\w+)\)|^(\w+(?:Error|Exception|Failure))\b")


def failure_kind(reason: str) -> str:
    """The kind of a failed episode, for counting: an environment failure's kind, an exception's name, or ``other``.

    ``reason``: the text in the record. Each kind becomes a metric, so free text of a user's own record is ``other``.
    """
    match = _KIND.search(reason)
    return (match[1] or match[2]) if match else "other"


_warned: set[str] = set()


def warn_once(text: str, kind: str | None = None) -> None:
    """Log a warning that may recur; each text once per process, or each ``kind`` where the text has numbers."""
    kind = kind or text
    if kind not in _warned and len(_warned) < MOST_WARNINGS:
        _warned.add(kind)
        logger.warning("%s", text)


class Failures:
    """Counts failures in this process by kind, and logs the first, tenth, hundredth, ... of each kind.

    Args:
        singular, plural: the noun for what fails.
    """

    def __init__(self, singular: str = "episode", plural: str = "episodes") -> None:
        self._singular, self._plural = singular, plural
        self.counts: Counter[str] = Counter()
        self.latest: dict[str, str] = {}
        """kind -> the latest reason, on one line"""

    def add(self, reason: str) -> None:
        kind = failure_kind(reason)
        self.counts[kind] += 1
        self.latest[kind] = " ".join(reason.split())[:500]
        count = self.counts[kind]
        if str(count).rstrip("0") == "1":
            logger.warning(
                "%d failed %s of the kind %r in this process so far, the latest: %s",
                *(count, self._plural if count > 1 else self._singular, kind, self.latest[kind]),
            )


class InvalidActions:
    """Warns once, early in a process, if most turns have no valid action: until that changes the model learns nothing.

    Of each 32 turns in a row, since a validation at temperature 0 may come first, with actions that are valid.

    Args:
        format: ``turnkey.rollout.action_format``.
        instruction: the prompt's description of that format.
    """

    TURNS, SHARE, LAST = 32, 0.5, 1024

    def __init__(self, format: str, instruction: str | None) -> None:
        self._format, self._instruction = format, instruction
        self._turns = self._invalid = 0
        self._first: tuple[str, str] | None = None
        self._over = False

    def add(self, response: str, reason: str | None) -> None:
        """Count a turn; ``reason``: why its action is invalid, None if it is valid."""
        if self._over:
            return
        if self._turns % self.TURNS == 0:
            self._invalid, self._first = 0, None
        self._turns += 1
        self._over = self._turns == self.LAST
        if reason is not None:
            self._invalid += 1
            self._first = self._first or (" ".join(response.split())[:200], reason)
        if self._turns % self.TURNS == 0 and self._first and self._invalid > self.SHARE * self.TURNS:
            self._over, (text, why) = True, self._first
            wanted = f", and the prompt says: {self._instruction}" if self._instruction else ""
            logger.warning(
                "%d of the last %d turns have no valid action. The first: %r, %s. "
                "turnkey.rollout.action_format is %s%s",
                *(self._invalid, self.TURNS, text, why, self._format, wanted),
            )
