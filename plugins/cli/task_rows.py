"""Tasks from the user's rows, in a file or a data set of the hub: their columns become kwargs and right answers."""

from __future__ import annotations

import csv
import inspect
import io
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.errors import MissingPackageError
from verl_turnkey.envs.registry import check_call
from verl_turnkey.envs.tasks import open_parquet
from verl_turnkey.plugins.checks.files import json_objects

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


def task_rows(source: str, accepted: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[list[TaskRow], str]:
    """The tasks of the rows of ``source``, and what became of the columns, in words.

    Args:
        source: as of :func:`read_rows`.
        accepted: argument of the environment -> its annotation, see :func:`arguments_of`.
        columns: target (an argument, or a key of ``BY_NAME``) -> column, also ``column.field`` of a nested one. What is
            not here is taken by its name.
    """
    rows = read_rows(source)
    held = list(dict.fromkeys(name for row in rows for name in row))
    accepted = {name: kind for name, kind in accepted.items() if name != "seed"}
    for target, column in columns.items():
        targets = [*accepted, *BY_NAME]
        if target not in targets:
            hint = did_you_mean(target, targets) or "."
            raise ConfigError(f"--columns: nobody reads {target!r}{hint} Targets are {', '.join(targets)}")
        if not isinstance(column, str):
            raise ConfigError(f"--columns: expected the name of a column for {target!r}, got {column!r}")
        if column.partition(".")[0] not in held:
            hint = did_you_mean(column, held) or "."
            raise ConfigError(f"--columns: {source} has no column {column!r}{hint} It has {', '.join(held)}")
    kwargs = {name: name for name in accepted if name in held} | {t: c for t, c in columns.items() if t in accepted}
    other = {
        target: columns.get(target) or next((name for name in names if name in held), None)
        for target, names in BY_NAME.items()
    }
    if not any((*kwargs.values(), *other.values())):
        usable = ", ".join(dict.fromkeys((*accepted, *(name for names in BY_NAME.values() for name in names))))
        raise ConfigError(
            f"{source}: tasks use none of its columns ({', '.join(held)}). They use {usable}; map others with --columns"
        )
    tasks = [_task(row, kwargs, other, accepted, f"{source}, row {n}") for n, row in enumerate(rows)]
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
            theirs = "" if name == "val" else f" and the {len(held)} of validation"
            purpose = f"--{name} {wanted}" if wanted else {"val": "validation", "train": "training"}[name]
            raise ConfigError(f"{purpose}: {len(split)} rows are left for it, without duplicates{theirs}")
    return rows[:train], held


def arguments_of(env_id: str) -> dict[str, Any]:
    """The arguments that the environment's constructor names, with their annotations.

    One without an annotation has the type of its default where that is a number, true or false.
    """
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    try:
        entry: Any = gymnasium.spec(env_id).entry_point
    except (gymnasium.error.Error, ModuleNotFoundError):
        check_call(env_id, {})  # its error names the closest id
        raise
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(creator).parameters.values()
    names = getattr(inspect.unwrap(creator.__init__ if inspect.isclass(creator) else creator), "__globals__", {})
    return {p.name: _annotation(p, names) for p in parameters if p.kind in kinds}


def _annotation(parameter: inspect.Parameter, names: dict[str, Any]) -> Any:
    kind = parameter.annotation
    if kind is parameter.empty:
        return type(parameter.default) if isinstance(parameter.default, int | float) else Any
    try:
        return get_type_hints(SimpleNamespace(__annotations__={"it": kind}), names)["it"]
    except Exception:  # a name for type checkers alone
        return Any


def _task(
    row: Row, kwargs: Mapping[str, str], other: Mapping[str, str | None], kinds: Mapping[str, Any], where: str
) -> TaskRow:
    values = {
        target: _typed(_value(row, column), kinds[target], f"{where}, column {column!r}")
        for target, column in kwargs.items()
    }
    extra = {target: None if column is None else _value(row, column) for target, column in other.items()}
    answer, hint = _json(extra["answer"], as_written=True), extra["hint"]
    prompt = _json(extra["prompt"])
    if not isinstance(prompt, list) or not all(isinstance(message, Mapping) for message in prompt):
        prompt = extra["prompt"]
    seed = _typed(extra["seed"], int, f"{where}, column {other['seed']!r}")
    if isinstance(answer, Mapping):
        answer = next((answer[key] for key in ANSWER_FIELDS if answer.get(key) not in (None, "", [])), None)
    return TaskRow(
        {name: value for name, value in values.items() if value is not None},
        None if seed is None else int(seed),
        prompt,
        answer,
        None if hint is None else str(hint),
    )


def _value(row: Row, column: str) -> Any:
    """As JSON has it; None for a missing entry."""
    value: Any = row.get(column)
    if value is None and "." in column:
        value = row
        for part in column.split("."):
            value = _json(value)
            value = value.get(part) if isinstance(value, Mapping) else None
    return _plain(value)


def _typed(value: Any, kind: Any, where: str) -> Any:
    """A cell as the annotation ``kind`` says; text where that takes text. A value with a type of its own keeps it."""
    if not isinstance(value, Cell):
        return value
    members = [_simple(member) for member in (get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,))]
    for choice in (choice for member in members if get_origin(member) is Literal for choice in get_args(member)):
        if str(choice) == value:
            return choice
    nested = [member for member in members if member not in (*_FROM_TEXT, str, type(None))]
    as_written = any(str in get_args(member) and not {int, float} & {*get_args(member)} for member in nested)
    if nested and (plain := _json(value, as_written=as_written)) is not value:
        return plain
    numbers = [] if str in members else [of for of in _FROM_TEXT if of in members]
    for of in numbers:
        with suppress(ValueError, KeyError, OverflowError):
            return _FROM_TEXT[of](value)
    if numbers and not nested:
        expected = " or ".join(_IN_WORDS[of] for of in numbers)
        raise ConfigError(f"{where}: expected {expected}, got {str(value)!r}")
    return str(value)


def _simple(kind: Any) -> Any:
    """``bool``, ``int``, ``float`` or ``str`` for a type of that kind, NumPy's among them."""
    bases = ((bool, bool), (int, Integral), (float, Real), (str, str))
    return next((of for of, base in bases if isinstance(kind, type) and issubclass(kind, base)), kind)


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        if not (number := float(text)).is_integer():  # 5.0 is how a table with empty cells writes 5
            raise
        return int(number)


_FROM_TEXT: dict[Any, Callable[[str], Any]] = {
    int: _integer,
    float: float,
    bool: lambda text: {"true": True, "1": True, "false": False, "0": False}[text.lower()],
}
_IN_WORDS = {int: "an integer", float: "a number", bool: "true or false"}


def _json(value: Any, *, as_written: bool = False) -> Any:
    """The list or object that a cell holds as JSON, ``as_written`` with its numbers as text; else the value itself."""
    if isinstance(value, Cell) and value[:1] in ("[", "{"):
        numbers: dict[str, Any] = {"parse_int": str, "parse_float": str} if as_written else {}
        with suppress(ValueError):
            return json.loads(value, **numbers)
    return value


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and math.isnan(value):
        return None
    return value


Row = Mapping[str, Any]


class Cell(str):
    """A cell of a table of text, which has no types: 007 may be a number or a name."""


READERS: dict[str, Callable[[Path], list[Row]]] = {
    ".jsonl": lambda path: json_objects(read_text(path)),
    ".json": lambda path: json_objects(read_text(path)),
    ".csv": lambda path: _cells(path, ","),
    ".tsv": lambda path: _cells(path, "\t"),
    ".parquet": lambda path: _table(path),
}
OTHER_FILES = (".txt", ".md", ".py", ".yaml", ".yml", ".xls", ".xlsx", ".gz", ".zip")
"""endings of files, not of data sets"""
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "bars"}


def read_rows(source: str) -> list[Row]:
    """The rows of a file, or of a data set: ``NAME[:CONFIG][@SPLIT]`` of the hub, or of a folder."""
    path = Path(source).expanduser()
    if path.suffix in READERS:
        if not path.is_file():
            raise ConfigError(f"{source}: there is no such file")
        try:
            rows = READERS[path.suffix](path)
        except ConfigError:
            raise
        except (ValueError, OSError, csv.Error) as error:
            raise ConfigError(f"{source} cannot be read as {path.suffix}: {error}") from error
    elif path.is_file() or (path.suffix in OTHER_FILES and not path.is_dir()):
        raise ConfigError(f"{source}: expected a file that ends with {', '.join(READERS)}")
    else:
        rows = _hub(source)
    if not isinstance(rows, list) or not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError(f"{source}: expected rows with named columns, one or more")
    return rows


def _cells(path: Path, sep: str) -> list[Row]:
    """The rows of a table of text; an empty cell is a missing one."""
    text = read_text(path, line_ends=True)
    csv.field_size_limit(sys.maxsize)
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=sep, strict=True)
    rows: list[Row] = []
    try:
        names = next(lines, [])
        _check_columns(path, names, sep, [line for line in text.splitlines() if line.strip()])
        for cells in filter(None, lines):
            if len(cells) > len(names):
                raise ValueError(f"line {lines.line_num} has {len(cells)} columns, and the first line {len(names)}")
            row = zip(names, cells, strict=False)  # a short line has no last cells
            rows.append({name: Cell(cell) if cell else None for name, cell in row if name})
    except csv.Error as error:
        quotes = 'a cell that begins with a quote ends with one, and "" stands for one in it'
        raise ValueError(f"line {lines.line_num}: {error} ({quotes})") from None
    return rows


def _check_columns(path: Path, names: list[str], sep: str, lines: list[str]) -> None:
    others = [other for other in SEPARATORS if other != sep and all(other in line for line in lines)]
    if len(names) == 1 and others:
        raise ConfigError(
            f"{path} has one column, {names[0]!r}: {path.suffix} files separate columns by {SEPARATORS[sep]}, "
            f"this one probably by {SEPARATORS[others[0]]}. Write it with {SEPARATORS[sep]}"
        )
    if twice := [name for n, name in enumerate(names) if name and name in names[:n]]:
        raise ConfigError(f"{path}: there are two columns {twice[0]!r}: rename one")


def _table(path: Path) -> list[Row]:
    """Not by pandas, where a column of integers with a missing entry is one of floats."""
    try:
        return open_parquet(path).read().to_pylist()
    except ModuleNotFoundError as error:
        raise MissingPackageError("reading .parquet needs pyarrow: pip install pyarrow") from error


def _hub(source: str) -> list[Row]:
    name, _, split = source.partition("@")
    name, _, config = name.partition(":")
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{source}: there is no such file. A data set of the hub needs its library: pip install datasets"
        ) from error
    reader: Any = datasets  # whose types do not know the options of each format
    try:
        load = partial(reader.load_dataset, name, config or None, split=split or None)
        loaded, files = load(), reader.load_dataset_builder(name, config or None).config
    except Exception as error:  # of the network, the hub, the data set's own files
        words = str(error).splitlines()[0] if str(error) else ""
        raise ConfigError(
            f"{source}: there is no such file here, and no data set of that name can be loaded "
            f"({type(error).__name__}: {words})"
        ) from error
    if isinstance(loaded, Mapping):
        raise ConfigError(f"{source}: choose a split, {' or '.join(f'{source}@{name}' for name in loaded)}")
    # The library guesses: of a cell of text that it is a number, of a text of JSON that it is a time.
    kinds, text = loaded.features, datasets.Value("string")
    if type(files).__name__ == "CsvConfig":
        options = {"keep_default_na": False, "na_values": [""]}
        loaded = load(features=datasets.Features(dict.fromkeys(kinds, text)), **options)
        return [{name: cell and Cell(cell) for name, cell in row.items()} for row in loaded]
    times = [name for name, kind in kinds.items() if str(getattr(kind, "dtype", "")).startswith("timestamp")]
    if times and type(files).__name__ == "JsonConfig" and not files.field and split in files.data_files:
        whole = reader.load_dataset("text", data_files=[*files.data_files[split]], split="train", sample_by="document")
        return [row for document in whole["text"] for row in json_objects(document)]
    return [dict(row) for row in loaded]
