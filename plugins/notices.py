"""What the run says on the console about itself: a logger of our own, and one line per new kind of failure.

Warnings of this package stay audible under settings that quiet everything else (``+turnkey/device=cpu``, a root logger
at ERROR): the level is set on the package's own logger, and whatever handlers the process has print what passes it.
"""

from __future__ import annotations

import logging
import re
from collections import Counter

logger = logging.getLogger("verl_turnkey")
if logger.level == logging.NOTSET:  # else somebody chose it
    logger.setLevel(logging.WARNING)

_KIND = re.compile(r"^(?:\w+: )?environment failure \((\w+)\)|^(\w+(?:Error|Exception|Failure))\b")


def failure_kind(reason: str) -> str:
    """What an episode failed of, for counting: an environment failure's kind, an exception's name, or ``other``.

    ``reason``: as it stands in the record. A record of the user's own may hold any words: those are ``other``, since
    each kind is a metric.
    """
    found = _KIND.search(reason)
    return (found[1] or found[2]) if found else "other"


class Failures:
    """Counts the failed episodes of this process by kind, and says the first, tenth, hundredth, ... of each kind."""

    def __init__(self) -> None:
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
                "%d failed episode%s of the kind %r in this process so far, the latest: %s",
                *(count, "s" * (count > 1), kind, self.latest[kind]),
            )
