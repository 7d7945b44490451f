"""Names from before version 2 of the log, translated: old logs, metrics, evaluations and launch lines still work.

A run that was resumed after an update has files of both versions, so the columns of each file tell its version.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from verl_turnkey.plugins.log.schema import COMPONENT, TABLES

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS: dict[str, dict[str, str]] = {
    "episodes": {"return": "env_return", "score": "composed_return"},
    "turns": {
        "state_key": "anchor",
        "next_key": "next_anchor",
        "env_reward": "reward",
        "reward": "composed_reward",  # version 2 has this name, too, for another quantity
        "reward.": "composed_reward.",
    },
    "credit": {"return": "value_target"},
}
"""table -> column of version 1, or with a dot at its end the prefix of a family -> column of version 2"""
_SAMPLE = {"return": "env_return", "score": "composed_return"}
_METRICS = {"episode/return/mean": "episode/composed_return/mean", "groups/score/mean": "groups/composed_return/mean"}
_VALIDATED = re.compile(r"(?P<source>val-\w+/.+)/(?P<name>episode_return|reward/[^@]+)(?P<mean>/\w+@\d+.*)")


def current_value(name: str) -> str:
    """The current name of a metric in ``algorithm.filter_groups.metric``, a name in ``reward_extra_info``."""
    if name.startswith("reward/"):
        return f"composed_return.{name.removeprefix('reward/')}"
    return "env_return" if name == "episode_return" else name


def current_columns(table: str, rows: pa.Table) -> pa.Table:
    """A file of ``table`` with the columns of version 2; one of version 2 is returned as it is."""
    if table == "steps" and "name" in rows.column_names:
        import pyarrow as pa

        names = pa.array([name and current_metric(name) for name in rows["name"].to_pylist()], pa.string())
        return rows.set_column(rows.column_names.index("name"), "name", names)
    former = COLUMNS.get(table, {})
    kept = {column.name for column in TABLES[table].columns}
    if not any(name in former and name not in kept for name in rows.column_names):
        return rows
    return rows.rename_columns([_renamed(name, former) for name in rows.column_names])


def _renamed(name: str, former: Mapping[str, str]) -> str:
    family, dot, member = name.partition(".")
    return former.get(f"{family}.", f"{family}.") + member if dot else former.get(name, name)


@cache
def current_metric(name: str) -> str:
    """A metric of verl's loggers by its current name."""
    if name.startswith("episode/reward/"):
        return f"episode/{current_value(name.removeprefix('episode/'))}/mean"
    if match := _VALIDATED.fullmatch(name):
        return f"{match['source']}/{current_value(match['name'])}{match['mean']}"
    return _METRICS.get(name, name)


def current_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A finished sample of ``turnkey eval``, or its result, by its current names."""
    renamed = {_SAMPLE.get(name, name): value for name, value in sample.items() if name != "rewards"}
    return renamed | {f"{COMPONENT}{label}": value for label, value in (sample.get("rewards") or {}).items()}
