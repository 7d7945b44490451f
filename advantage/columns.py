"""Turns users' columns, sequences or arrays of anything, into numpy arrays, or names the invalid row.

A missing entry is None, the NA or NaT of pandas, or the NaT of numpy. As an anchor or action it matches nothing. It is
None in texts and in extra columns of objects, like nan, and nan in the critic's values and in extra columns of numbers.
All other columns refuse it, and nan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import count
from numbers import Number
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_turnkey.advantage.group_ops import Floats, Ints

Bools = NDArray[np.bool_]
Column = Sequence[Any] | NDArray[Any]
Place = Callable[[int], str]  # where a row is, for error messages

#: Limit of rewards, scores and penalties: the trainer computes in float32, which cannot square larger numbers, and
#: a sum with such a number loses all smaller ones.
LARGEST_REWARD = 1e18

#: Names of types whose values may be missing entries, so that pandas need not be imported.
MISSING = ("NAType", "NaTType", "datetime64", "timedelta64")


def canonical(value: Any) -> Any:
    """A hashable stand-in for an id of any structure: equal stand-ins, equal ids."""
    if value is None or isinstance(value, str | int | bytes):
        return value
    if hasattr(value, "tolist") and type(plain := value.tolist()) is not type(value):  # arrays, tensors, numpy scalars
        return canonical(plain)
    if isinstance(value, Number):
        if value != value:
            raise ValueError(
                "nan equals nothing, not even itself; use None for a state that never matches (with pandas: "
                "column.astype(object).where(column.notna(), None))"
            )
        return value
    if isinstance(value, list | tuple):
        return tuple(map(canonical, value))
    if isinstance(value, Mapping):
        return Mapping, frozenset((canonical(k), canonical(v)) for k, v in value.items())
    if isinstance(value, Set):
        return Set, frozenset(map(canonical, value))
    if _missing(value):
        return None
    hash(value)
    return value


def common_length(columns: Mapping[str, Any]) -> int:
    """The length that all columns have."""
    size: int | None = None
    for name, column in columns.items():
        scalar = not hasattr(column, "__len__") or getattr(column, "ndim", 1) == 0  # whose len() raises
        if scalar or isinstance(column, str | bytes | Mapping):
            raise ValueError(f"{name}: expected a sequence with one entry per step, got {type(column).__name__}")
        size = len(column) if size is None else size
        if len(column) != size:
            raise ValueError(f"{name}: expected {size} entries, one per step as in group, got {len(column)}")
    return size or 0


def plain(column: Any) -> Sequence[Any]:
    """The entries of a column as Python values, if an array or tensor provides them; missing ones are None."""
    values = column.tolist() if hasattr(column, "tolist") else column
    if any(t.__name__ in MISSING for t in set(map(type, values))):
        return [None if _missing(value) else value for value in values]
    return values


def _missing(value: Any) -> bool:
    """Whether an entry is a missing value of pandas or numpy, besides nan."""
    name = type(value).__name__
    return name in MISSING and (name not in ("datetime64", "timedelta64") or bool(np.isnat(value)))


def encode(name: str, column: Any, none_allowed: bool) -> tuple[Ints, list[Any]]:
    """Integer codes (S,) in order of appearance, and the id behind each code."""
    values = plain(column)
    if not set(map(type, values)) <= {str, int, bool, bytes, type(None)}:
        keys = []
        for row, value in enumerate(values):
            try:
                keys.append(canonical(value))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}: row {row}: cannot use {value!r} as an id: {error}") from None
    else:
        keys = values
    # The first lookup of a key assigns the next code: one pass, all in C.
    index: dict[Any, int] = defaultdict(count().__next__)
    index[None] = -1
    codes = np.fromiter(map(index.__getitem__, keys), np.int64, len(keys))
    del index[None]
    nothing = np.flatnonzero(codes < 0)
    if len(nothing) and not none_allowed:
        raise ValueError(f"{name}: row {nothing[0]}: expected an id, got None")
    codes[nothing] = len(index) + np.arange(len(nothing))  # a separate code for each: None never matches
    return codes, list(index)


def amounts(name: str, column: Any, place: Place, low: float = -LARGEST_REWARD) -> Floats:
    """A column of numbers from ``low`` to :data:`LARGEST_REWARD` as float64 (S,)."""
    expected = f"a number from {low:g} to {LARGEST_REWARD:g}".replace("+", "")
    array = _numbers(name, column, place, expected).astype(np.float64, copy=False)
    _refuse(name, column, place, expected, ~((low <= array) & (array <= LARGEST_REWARD)))  # nan neither
    return array


def values(name: str, column: Any, place: Place) -> Floats:
    """A column of a critic's finite numbers as float64 (S,), nan where there is none."""
    array = _numbers(name, column, place, "a finite number", gaps=True).astype(np.float64, copy=False)
    _refuse(name, column, place, "a finite number", np.isinf(array))
    return array


def ints(name: str, column: Any, place: Place) -> Ints:
    """A column of integers from 0 to 2^63 - 1 as int64 (S,); floats that are whole numbers are accepted, too."""
    expected = "an integer >= 0"
    array = _numbers(name, column, place, expected)
    large = array >= 2.0**63 if array.dtype.kind == "f" else array > np.iinfo(np.int64).max
    _refuse(name, column, place, "an integer below 2^63", np.isfinite(array) & large)
    _refuse(name, column, place, expected, ~np.isfinite(array) | (array != np.floor(array)) | (array < 0))
    return array.astype(np.int64, copy=False)


def bools(name: str, column: Any, place: Place) -> Bools:
    """A column of truth values, or of 0 and 1, as bool (S,)."""
    array = _array(column)
    if array.dtype.kind not in "biuf" or array.ndim != 1 or not np.isin(array, (0, 1)).all():
        for row, entry in enumerate(plain(column)):
            if not isinstance(entry, int | float | np.number | np.bool_) or entry not in (True, False):
                raise ValueError(f"{name}: {place(row)}: expected true or false, got {entry!r}")
    return array.astype(bool)


def objects(column: Any) -> NDArray[np.object_]:
    """Any column as an object array (S,), nested sequences unchanged; None for missing entries and nan."""
    values = (None if isinstance(value, float | np.floating) and value != value else value for value in plain(column))
    return np.fromiter(values, dtype=object, count=len(column))


def numbers_or_objects(column: Any) -> NDArray[Any]:
    """A column of numbers as float64 (S,), None being nan; any other as an object array."""
    values = plain(column)
    types = set(map(type, values))
    if np.timedelta64 in types or not all(issubclass(t, int | float | np.number | np.bool_ | None) for t in types):
        return objects(column)
    try:
        array = np.array(values, dtype=np.float64)
    except OverflowError:  # an integer beyond all floats
        return objects(column)
    exact = not (np.abs(array) >= 2**53).any() or not any(issubclass(t, int | np.integer) for t in types)
    return array if exact else objects(column)  # a large integer is a key, and as a float it would equal its neighbours


def _array(column: Any) -> NDArray[Any]:
    """A copy of a column; of dtype object if numpy cannot convert it."""
    if len(column) == 0:
        return np.zeros(0)
    try:
        return np.array(np.asarray(column))  # asarray first: a tensor cannot be told to copy
    except (TypeError, ValueError, RuntimeError):  # ragged entries, or a tensor that numpy cannot read
        return np.fromiter(plain(column), dtype=object, count=len(column))


def _numbers(name: str, column: Any, place: Place, expected: str, *, gaps: bool = False) -> NDArray[Any]:
    """A column of numbers, as numpy or float64 holds them; with ``gaps`` nan for each missing entry."""
    array = _array(column)
    if array.dtype.kind in "iuf" and array.ndim == 1:
        return array
    numbers = np.full(len(column), np.nan)
    for row, entry in enumerate(plain(column)):
        if gaps and entry is None:
            continue
        try:
            if not isinstance(entry, int | float | np.number | np.bool_) or isinstance(entry, np.timedelta64):
                raise TypeError
            numbers[row] = entry
        except (TypeError, OverflowError):
            raise ValueError(f"{name}: {place(row)}: expected {expected}, got {entry!r}") from None
    return numbers


def _refuse(name: str, column: Any, place: Place, expected: str, bad: Bools) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        raise ValueError(f"{name}: {place(row)}: expected {expected}, got {plain(column)[row]!r}")
