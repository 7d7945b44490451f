"""Tasks from rows of the user's own: a file of them, or a data set of the hub, becomes kwargs and right answers."""

from __future__ import annotations

import inspect
import json
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.errors import MissingPackageError
from verl_turnkey.envs.registry import check_call
from verl_turnkey.plugins.checks.files import json_rows

Row = Mapping[str, Any]

READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": json_rows,
    ".json": json_rows,
    ".csv": lambda path: _frame(path, ","),
    ".tsv": lambda path: _frame(path, "\t"),
    ".parquet": lambda path: _table(path),
}
BY_NAME = {
    "answer": (
        *("gold_answers", "gold_answer", "golden_answers", "answers", "answer"),
        *("ground_truth", "target", "reward_model"),
    ),
    "prompt": ("prompt", "question", "query", "problem", "instruction"),
    "seed": ("seed",),
    "hint": ("turnkey_hint", "hint"),
}
"""what a row gives beside kwargs, and the columns that hold it unless ``--columns`` says another; the first counts"""

ANSWER_FIELDS = ("text", "value", "target", "ground_truth")
"""of a nested answer, as SQuAD, TriviaQA, Search-R1 and verl have it"""


@dataclass(frozen=True)
class TaskRow:
    """What one row says of a task."""

    kwargs: dict[str, Any] = field(default_factory=dict)
    seed: int | None = None
    prompt: Any = None
    """text, or a list of messages"""
    answer: Any = None
    """text, number or a list: ``reward_model.ground_truth``"""
    hint: str | None = None

    @property
    def key(self) -> str:
        """Equal for equal tasks."""
        return json.dumps([self.kwargs, self.seed, self.prompt, self.answer], sort_keys=True, default=str)


def read_rows(source: str) -> list[Row]:
    """The rows of a file, or of a data set: ``NAME[:CONFIG][@SPLIT]`` of the hub, or of a folder."""
    path = Path(source).expanduser()
    if path.suffix in READERS:
        if not path.is_file():
            raise ConfigError(f"{source}: there is no such file")
        try:
            rows = READERS[path.suffix](path)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{source} cannot be read as {path.suffix}: {error}") from error
    elif path.is_file():
        raise ConfigError(f"{source}: expected a file that ends with {', '.join(READERS)}")
    else:
        rows = _hub(source)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"{source}: expected rows with named columns, one or more")
    return rows


def task_rows(source: str, accepted: Iterable[str], columns: Mapping[str, str]) -> tuple[list[TaskRow], str]:
    """The tasks of the rows of ``source``, and what became of the columns, in words.

    Args:
        source: as of :func:`read_rows`.
        accepted: arguments of the environment.
        columns: target (an argument, or a key of ``BY_NAME``) -> column, also ``column.field`` of a nested one. What is
            not here is taken by its name.
    """
    rows = read_rows(source)
    held = list(dict.fromkeys(name for row in rows for name in row))
    accepted = [name for name in accepted if name not in ("seed",)]
    for target, column in columns.items():
        known = [*accepted, *BY_NAME]
        if target not in known:
            hint = did_you_mean(target, known) or "."
            raise ConfigError(f"--columns: nobody reads {target!r}{hint} Targets are {', '.join(known)}")
        if column.partition(".")[0] not in held:
            hint = did_you_mean(column, held) or "."
            raise ConfigError(f"--columns: {source} has no column {column!r}{hint} It has {', '.join(held)}")
    kwargs = {name: name for name in accepted if name in held} | {t: c for t, c in columns.items() if t in accepted}
    other = {
        target: columns.get(target) or next((name for name in names if name in held), None)
        for target, names in BY_NAME.items()
    }
    tasks = [_task(row, kwargs, other) for row in rows]
    used = [f"{column} -> {target}" for target, column in [*kwargs.items(), *other.items()] if column]
    taken = {str(column).partition(".")[0] for column in [*kwargs.values(), *other.values()]}
    rest = [name for name in held if name not in taken]
    return tasks, f"columns: {', '.join(used) or 'none'}" + (f"; not used: {', '.join(rest)}" if rest else "")


def split_rows(
    own: Sequence[TaskRow], others: Sequence[TaskRow] | None, train: int | None, val: int | None, seed: int
) -> tuple[list[TaskRow], list[TaskRow]]:
    """``train`` rows for training and ``val`` for validation, in a random order; equal tasks are in one of them only.

    ``others``: the rows that validation takes; None: it takes those of ``own``, by default a tenth, at most 128.
    """
    rng = random.Random(seed)
    rows = list({row.key: row for row in own}.values())
    rng.shuffle(rows)
    if others is None:
        number = val or max(1, min(128, len(rows) // 10))
        held, rows = rows[:number], rows[number:]
    else:
        held = list({row.key: row for row in others}.values())
        keys = {row.key for row in held}
        rows = [row for row in rows if row.key not in keys]
        held = held[:val]
    for name, split, wanted in (("val", held, val), ("train", rows, train)):
        if not split or (wanted or 0) > len(split):
            and_theirs = "" if name == "val" else " and those of validation"
            raise ConfigError(
                f"--{name} {wanted or 1}: there are {len(split)} rows for it, without equal ones{and_theirs}"
            )
    return rows[:train], held


def arguments_of(env_id: str) -> list[str]:
    """The arguments that the environment's constructor names."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    try:
        entry: Any = gymnasium.spec(env_id).entry_point
    except (gymnasium.error.Error, ModuleNotFoundError):
        check_call(env_id, {})  # its error names the closest id
        raise
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in inspect.signature(creator).parameters.values() if p.kind in kinds]


def _task(row: Row, kwargs: Mapping[str, str], other: Mapping[str, str | None]) -> TaskRow:
    values = {target: _value(row, column) for target, column in kwargs.items()}
    extra = {target: None if column is None else _value(row, column) for target, column in other.items()}
    answer, seed, hint = extra["answer"], extra["seed"], extra["hint"]
    if isinstance(answer, Mapping):
        answer = next((answer[key] for key in ANSWER_FIELDS if answer.get(key) not in (None, "", [])), None)
    return TaskRow(
        {name: value for name, value in values.items() if value is not None},
        None if seed is None else int(seed),
        extra["prompt"],
        answer,
        None if hint is None else str(hint),
    )


def _value(row: Row, column: str) -> Any:
    """As JSON has it; None for a missing entry."""
    value: Any = row.get(column)
    if value is None and "." in column:
        value = row
        for part in column.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    return _plain(value)


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


def _cell(value: Any) -> Any:
    """A cell of a CSV file, which can hold a list or an object only as JSON."""
    if isinstance(value, str) and value[:1] in "[{":
        with suppress(ValueError):
            return json.loads(value)
    return value


def _frame(path: Path, sep: str) -> list[Row]:
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise MissingPackageError(f"reading {path.suffix} needs pandas: pip install pandas") from error
    # An answer may be NA, or None. With converted types integers stay integers beside an empty cell.
    frame = pd.read_csv(path, sep=sep, keep_default_na=False, na_values=[""]).convert_dtypes()
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return [{name: _cell(value) for name, value in row.items()} for row in rows]


def _table(path: Path) -> list[Row]:
    """Not by pandas, where a column of integers with a missing entry is one of floats."""
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise MissingPackageError("reading .parquet needs pyarrow: pip install pyarrow") from error
    return pq.ParquetFile(path).read().to_pylist()


def _hub(source: str) -> list[Row]:
    name, _, split = source.partition("@")
    name, _, config = name.partition(":")
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{source}: there is no such file. A data set of the hub needs its library: pip install datasets"
        ) from error
    try:
        loaded = datasets.load_dataset(name, config or None, split=split or None)
    except Exception as error:  # of the network, the hub, the data set's own files
        words = str(error).splitlines()[0] if str(error) else ""
        raise ConfigError(
            f"{source}: there is no such file here, and no data set of that name can be loaded "
            f"({type(error).__name__}: {words})"
        ) from error
    if isinstance(loaded, Mapping):
        raise ConfigError(f"{source}: choose a split, {' or '.join(f'{source}@{name}' for name in loaded)}")
    return [dict(row) for row in loaded]
