"""Columns around a turn: hint and skill of a data row, and what ``info["extra"]`` becomes in a record.

Imports nothing of verl, since the driver's checks and probe need it, too.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from verl_turnkey.envs.tasks import HINT

HINT_SHARE = "turnkey_hint_share"
"""field of a data row: the share of its hint that is shown, written by the trainer"""


def hint_words(text: Any) -> list[str]:
    """The words of a hint; empty for None and NaN, as in data without one."""
    return text.split() if isinstance(text, str) else []


def hint_line(row: Mapping[str, Any]) -> str:
    """The first words of the row's hint, as a line after the task; empty without a hint."""
    hint = hint_words(row.get(HINT))
    number = math.ceil(len(hint) * float(row.get(HINT_SHARE) or 0.0) - 1e-9)
    return f"\nHint: {' '.join(hint[:number])}" if number else ""


def skill_line(row: Mapping[str, Any], column: str | None) -> str:
    """The text in ``column`` of the row, or under that key of its ``extra_info``, after a line break; else empty.

    The policy reads the text that a teacher's source ``task_skill`` keeps from it: Skill-GRPO of arXiv:2605.15155.
    """
    extra = row.get("extra_info")
    text = None if column is None else row.get(column, extra.get(column) if isinstance(extra, Mapping) else None)
    return f"\n{text}" if isinstance(text, str) and text.strip() else ""


def extras(info: dict[str, Any], next_info: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """``info["extra"]`` before a step and after it; the same object if the step changed nothing."""
    extra, next_extra = info.setdefault("extra", {}), next_info.setdefault("extra", {})
    if next_info["invalid"] and next_extra == extra:  # a refused action
        next_extra = next_info["extra"] = extra
    return extra, next_extra


def countable(
    extra: Mapping[str, Any], next_extra: Mapping[str, Any], before: Collection[str] = ()
) -> dict[str, float | str]:
    """The columns ``extra.<name>`` that an estimator may read: numbers and texts of ``info["extra"]``, lists by length.

    The values are those of the next state, except for the names in ``before``, which are taken from the state before
    the step. For an action that was not applied, numbers of the next state are 0.
    """
    columns: dict[str, float | str] = {}
    for name in {**extra, **next_extra}:
        source = extra if name in before else next_extra
        value = source.get(name)
        if isinstance(value, str):
            columns[name] = value
        elif isinstance(value, bool | int | float | list | tuple):
            number = float(len(value) if isinstance(value, list | tuple) else value)
            columns[name] = 0.0 if next_extra is extra and name not in before else number
    return columns


ROLE = "role"
"""the column of who took a step, always that of the state before"""
ROLE_OUTCOME = "role_outcome"
"""the column of what the step's role got for the episode, where the environment declares several"""
SUMMARY_OF = "summary of "
"""how the anchor of a turn begins in which the model summarizes its conversation; its state's anchor follows"""
TURN_LIMIT = "turn_limit"
"""the column of how many turns an episode may have; written if the method reads it"""


def turn_limit(*limits: Any) -> float:
    """The smallest of those that are known, numbers above 0; 0: none is."""
    return float(min((limit for limit in limits if isinstance(limit, int | float) and limit > 0), default=0))
