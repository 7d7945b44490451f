"""What an agent loop reports about its steps: the versioned record in ``extra_fields["turnkey"]`` of every row.

::

    {"version": 3,
     "failed": None | "reason",
     "branch": int,
     "steps": [{"step": int, "reward": float, "anchor": str | int | None, "action": str | None, "valid": bool,
                "penalty": float, "terminated": bool, "truncated": bool, "success": bool,
                "extra": {name: float | str}, "composed_reward": float, "version": int,
                "after": int, "request": int, "outcome": float}]}

``reward`` is the environment's. ``composed_reward`` is optional; where present, the estimators see it instead of
``reward``. The ``version`` of a step is that of the newest weights that wrote it, and optional; records of version 1
have none. ``after``, ``request`` and ``outcome`` are those of :class:`~.batch.StepBatch`: optional, on all steps of a
trajectory whose steps are a tree.
One row per step: one entry. One row per trajectory: one entry per turn. Group and rollout are not in the record, they
come from verl's row key. ``branch`` identifies the trajectories of a rollout that forked: absent or 0 on the rows
of the first one; records before version 3 have none. A failed episode is a single row with a reason and no steps. Only
plain Python values: the record travels through msgpack and pickle.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import inf
from typing import Any, NoReturn

from verl_turnkey.advantage.columns import LARGEST_REWARD
from verl_turnkey.advantage.params import did_you_mean

RECORD_VERSION = 3
READ_VERSIONS = (1, 2, 3)

_BOOL = ((bool,), 0, 1, "a bool")
_REWARD = ((float, int), -LARGEST_REWARD, LARGEST_REWARD, "a float from -1e18 to 1e18")
#: The types of each field, the bounds of its numbers, and both in words.
_FIELDS: dict[str, tuple[tuple[type, ...], float | None, float, str]] = {
    "step": ((int,), 0, inf, "an int >= 0"),
    "reward": _REWARD,
    "anchor": ((str, int, type(None)), None, inf, "a str, an int or None (hash a structured state to a str)"),
    "action": ((str, type(None)), None, inf, "a str or None"),
    "valid": _BOOL,
    "penalty": ((float, int), 0, LARGEST_REWARD, "a float from 0 to 1e18 (it is subtracted)"),
    "terminated": _BOOL,
    "truncated": _BOOL,
    "success": _BOOL,
    "extra": ((dict,), None, inf, "a dict of float or str by name"),
}
_OPTIONAL = {
    "composed_reward": _REWARD,
    "version": ((int,), 0, inf, "an int >= 0, or left out"),
    "after": ((int,), -1, inf, "an int >= -1, or left out"),
    "request": ((int,), 0, inf, "an int >= 0, or left out"),
    "outcome": _REWARD,
}
_ALL = _FIELDS | _OPTIONAL


class RecordError(ValueError):
    """A record is malformed. The message names the row and the field."""


def make_step(
    *,
    step: int,
    reward: float,
    anchor: str | int | None = None,
    action: str | None = None,
    valid: bool = True,
    penalty: float = 0.0,
    terminated: bool = False,
    truncated: bool = False,
    success: bool = False,
    extra: Mapping[str, float | str] | None = None,
    composed_reward: float | None = None,
    version: int | None = None,
    after: int | None = None,
    request: int | None = None,
    outcome: float | None = None,
) -> dict[str, Any]:
    """One entry of a record. Numpy scalars are turned into Python's; nothing else is converted.

    ``step``: 0, 1, 2, ... in the trajectory. ``reward``: the environment's, without the penalty. ``anchor``: the key of
    the state the action was taken in. ``success``: whether the trajectory solved the task, on all of its steps.
    ``composed_reward``: what the estimators see in the place of ``reward``; None: they see ``reward``. ``version``: of
    the newest weights that wrote the step's tokens, which counts for the staleness of these tokens; None: not known.
    ``after``, ``request``, ``outcome``: of a trajectory whose steps are a tree, see :class:`~.batch.StepBatch`.

    Raises:
        RecordError: a value of the wrong type or range.
    """
    columns: Any = {} if extra is None else extra
    entry = {
        "step": _plain(step),
        "reward": _plain(reward),
        "anchor": _plain(anchor),
        "action": _plain(action),
        "valid": _plain(valid),
        "penalty": _plain(penalty),
        "terminated": _plain(terminated),
        "truncated": _plain(truncated),
        "success": _plain(success),
        "extra": {name: _plain(value) for name, value in columns.items()} if hasattr(columns, "items") else columns,
    }
    optional = {"composed_reward": composed_reward, "version": version}
    optional |= {"after": after, "request": request, "outcome": outcome}
    entry |= {name: _plain(value) for name, value in optional.items() if value is not None}
    _check_step(entry, "make_step")
    return entry


def make_record(steps: Iterable[Mapping[str, Any]], failed: str | None = None, branch: int = 0) -> dict[str, Any]:
    """The record of a row: its steps (from :func:`make_step`), or no steps and the reason why the episode failed.

    ``branch``: which trajectory of the rollout its steps are of, if that forked; of the first one 0. A trajectory that
    begins at a fork holds its own steps only, numbered on from there.

    Raises:
        RecordError: as :func:`validate_record`.
    """
    if isinstance(steps, Mapping | str) or not isinstance(steps, Iterable):
        raise RecordError(f"make_record: steps: expected a list of steps (from make_step), got {_got(steps)}")
    record = {
        "version": RECORD_VERSION,
        "failed": failed,
        "steps": [dict(step) if isinstance(step, Mapping) else step for step in steps],
    }
    if branch:
        record["branch"] = _plain(branch)
    validate_record(record, "make_record")
    return record


def validate_record(record: Any, row_key: str) -> None:
    """Check a record against the schema; ``row_key`` says in errors which row it is.

    Raises:
        RecordError: names the row key and the field, what was expected, and what was found.
    """
    if type(record) is not dict:
        raise RecordError(f"{row_key}: expected the record to be a dict, got {_got(record)}; build it with make_record")
    if (version := record.get("version")) not in READ_VERSIONS:
        expected = " or ".join(map(str, READ_VERSIONS))
        raise RecordError(f"{row_key}: version: expected {expected}, got {_got(version)}")
    if record.keys() - {"branch"} != {"version", "failed", "steps"}:
        _raise_fields(record, ("version", "failed", "steps"), row_key, ("branch",))
    if type(branch := record.get("branch", 0)) is not int or branch < 0:
        raise RecordError(f"{row_key}: branch: expected an int >= 0, or left out, got {_got(branch)}")
    failed, steps = record["failed"], record["steps"]
    if type(steps) is not list:
        raise RecordError(f"{row_key}: steps: expected a list of dicts, got {_got(steps)}")
    if failed is None:
        if not steps:
            raise RecordError(
                f"{row_key}: steps: expected at least one step, got none; an episode without any must state the "
                "reason in failed"
            )
    elif type(failed) is not str or not failed:
        raise RecordError(f"{row_key}: failed: expected None or the reason as a str, got {_got(failed)}")
    elif steps:
        raise RecordError(f"{row_key}: steps: expected none, because failed is {failed!r}, got {len(steps)}")
    for i, entry in enumerate(steps):
        _check_step(entry, f"{row_key}: steps[{i}]" if len(steps) > 1 else row_key)
    if len(steps) > 1 and len(numbers := {entry["step"] for entry in steps}) < len(steps):
        got = f"got {len(steps)} steps, {len(numbers)} numbers"
        raise RecordError(f"{row_key}: steps: expected each step number once, {got}")


def _check_step(entry: Any, where: str) -> None:
    if type(entry) is not dict:
        raise RecordError(f"{where}: expected a step to be a dict, got {_got(entry)}; build it with make_step")
    if not _FIELDS.keys() <= entry.keys() <= _ALL.keys():
        _raise_fields(entry, _FIELDS, where, _OPTIONAL)
    # type(...) and not isinstance: a bool is not a step number, and a numpy scalar would not survive msgpack
    for name, value in entry.items():
        types, low, high, expected = _ALL[name]
        if type(value) not in types or (low is not None and not low <= value <= high):  # nan neither
            raise RecordError(f"{where}: {name}: expected {expected}, got {_got(value)}")
    for name, value in entry["extra"].items():
        if type(name) is not str or type(value) not in (float, int, str):
            raise RecordError(f"{where}: extra.{name}: expected a float or a str under a str name, got {_got(value)}")


def _raise_fields(entry: dict[str, Any], required: Iterable[str], where: str, optional: Iterable[str] = ()) -> NoReturn:
    names = [*required, *optional]
    for name in entry:
        if name not in names:
            raise RecordError(
                f"{where}: {name}: unknown field{did_you_mean(name, names) or ';'} known: {', '.join(names)}"
            )
    missing = ", ".join(name for name in required if name not in entry)
    raise RecordError(f"{where}: {missing}: missing field")


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _got(value: Any) -> str:
    return "None" if value is None else f"{value!r} ({type(value).__name__})"
