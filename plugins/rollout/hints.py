"""A hint of a data row, behind the text of the task in the prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verl_turnkey.envs.tasks import HINT as COLUMN

SHARE = "turnkey_hint_share"
"""of a data row: the share of it that is shown, which the trainer writes"""


def words(text: Any) -> list[str]:
    """Those of a hint; None and NaN, as data without one may hold, are no words."""
    return text.split() if isinstance(text, str) else []


def hint_line(row: Mapping[str, Any]) -> str:
    """The first words of the row's hint, as a line behind the task; empty without any."""
    hint = words(row.get(COLUMN))
    number = math.ceil(len(hint) * float(row.get(SHARE) or 0.0) - 1e-9)
    return f"\nHint: {' '.join(hint[:number])}" if number else ""
