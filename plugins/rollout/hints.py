"""Hint and skill of a data row, shown after the text of the task in the prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verl_turnkey.envs.tasks import HINT as COLUMN

SHARE = "turnkey_hint_share"
"""field of a data row: the share of its hint that is shown, written by the trainer"""


def words(text: Any) -> list[str]:
    """The words of a hint; empty for None and NaN, as in data without one."""
    return text.split() if isinstance(text, str) else []


def hint_line(row: Mapping[str, Any]) -> str:
    """The first words of the row's hint, as a line after the task; empty without a hint."""
    hint = words(row.get(COLUMN))
    number = math.ceil(len(hint) * float(row.get(SHARE) or 0.0) - 1e-9)
    return f"\nHint: {' '.join(hint[:number])}" if number else ""


def skill_line(row: Mapping[str, Any], column: str | None) -> str:
    """The text in ``column`` of the row, or under that key of its ``extra_info``, after a line break; else empty.

    The policy reads the text that a teacher's source ``task_skill`` keeps from it: Skill-GRPO of arXiv:2605.15155.
    """
    extra = row.get("extra_info")
    text = None if column is None else row.get(column, extra.get(column) if isinstance(extra, Mapping) else None)
    return f"\n{text}" if isinstance(text, str) and text.strip() else ""
