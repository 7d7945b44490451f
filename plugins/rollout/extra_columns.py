"""``info["extra"]`` before and after a step, and the columns of a record that it becomes.

Imports nothing of verl, since the probe in the driver and on every node needs it, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


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
