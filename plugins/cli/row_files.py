"""Rows of the user's own: those of a file, or of a data set of the hub."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.errors import MissingPackageError
from verl_turnkey.envs.tasks import open_parquet
from verl_turnkey.plugins.checks.files import json_objects

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
    elif path.is_file():
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
