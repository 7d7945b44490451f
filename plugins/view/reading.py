"""Reads the tables of the trajectory log, also while a run writes them, or after it was killed."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_turnkey.plugins.log.former_names import current_columns
from verl_turnkey.plugins.log.schema import STEP, TABLES, families, schema
from verl_turnkey.plugins.log.segments import SEGMENT, read_segments

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa


class Part(NamedTuple):
    """A file of a table."""

    path: Path
    step: int
    segment: str


def read(folder: str | Path, table: str, steps: Collection[int] | None = None) -> pd.DataFrame:
    """The rows of a table, with the further columns ``step`` and ``segment``; columns that no file has are null.

    Columns and metrics of a log of version 1 get their names of version 2.

    Steps that a later start of the trainer did again replace those of earlier starts. A warning names the replaced
    steps, and every file that cannot be read or does not belong to the log.

    Args:
        folder: ``<run>/turnkey_log``; no rows if it lacks the table.
        table: a name in :data:`~verl_turnkey.plugins.log.schema.TABLES`.
        steps: read only these partitions.
    """
    import pyarrow as pa

    folder = Path(folder)
    tables = [rows for part in parts(folder, table, steps) if (rows := _rows(part, table)) is not None]
    own = tuple(dict.fromkeys(n for rows in tables for n in rows.column_names if n.startswith(families(table))))
    fields = schema(table, own).append(pa.field("step", pa.int32())).append(pa.field("segment", pa.string()))
    whole = pa.concat_tables([fields.empty_table(), *tables], promote_options="default")
    frame = whole.to_pandas()
    if TABLES[table].writer == "rollout" and frame["segment"].nunique() > 1:
        # An asynchronous trainer that resumes plays its unfinished groups again, under the same keys.
        latest = frame.groupby("episode")["segment"].transform("max")
        frame = frame[frame["segment"] == latest].reset_index(drop=True)
    return frame


def parts(folder: Path, table: str, steps: Collection[int] | None = None) -> list[Part]:
    """The current files of ``table``, earlier steps and starts first; warns about the others."""
    if table not in TABLES:
        raise ValueError(f"the trajectory log has no table {table!r}; it has {', '.join(TABLES)}")
    foreign: list[Path] = []
    readable = sorted(_files(folder / table, steps, foreign), key=lambda part: (part.step, part.segment, part.path))
    if foreign:
        _warn(f"left out, not a file of the trajectory log: {_names(foreign)}")
    resumed = {segment: facts.get("resumed_from") for segment, facts in read_segments(folder).items()}
    there = {(part.step, part.segment) for part in readable}
    current = [part for part in readable if not _replaced(part, resumed, there)]
    if len(current) < len(readable):
        redone = sorted({part.step for part in set(readable) - set(current)})
        _warn(f"{table}: a later start of the trainer did steps {redone[0]} to {redone[-1]} again: its rows count")
    return current


def _files(folder: Path, steps: Collection[int] | None, foreign: list[Path]) -> Iterator[Part]:
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        step = STEP.fullmatch(path.name)
        if step is None or not path.is_dir():
            foreign.append(path)
        elif steps is None or int(step[1]) in steps:
            for file in path.iterdir():
                segment = file.name.partition("-")[0]
                if file.suffix == ".parquet" and SEGMENT.fullmatch(segment):
                    yield Part(file, int(step[1]), segment)
                elif not file.name.startswith("."):  # else it is being written
                    foreign.append(file)


def _replaced(part: Part, resumed: dict[str, Any], there: set[tuple[int, str]]) -> bool:
    """Whether a later start did the step of ``part`` again: any step after the one that it resumed from.

    The step that a start resumes from may have a validation of both. If that step is unknown, the start has done the
    steps that it has rows of.
    """
    for segment in {*resumed, *(segment for _, segment in there)}:
        if segment > part.segment:
            begun = resumed.get(segment)
            if part.step > begun if isinstance(begun, int) else (part.step, segment) in there:
                return True
    return False


def _rows(part: Part, table: str) -> pa.Table | None:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(part.path) as file:  # read_table would make a column of the folder's name
            rows = current_columns(table, file.read())
        own = tuple(name for name in rows.column_names if name.startswith(families(table)))
        known = schema(table, own)
        columns = {n: rows[n].cast(known.field(n).type) if n in known.names else rows[n] for n in rows.column_names}
    except (OSError, pa.ArrowException) as error:
        _warn(f"left out, it cannot be read: {part.path}: {error}")
        return None
    columns |= {"step": pa.repeat(pa.scalar(part.step, pa.int32()), len(rows))}
    return pa.table(columns | {"segment": pa.repeat(pa.scalar(part.segment), len(rows))})


def _names(paths: list[Path]) -> str:
    more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
    return ", ".join(map(str, paths[:3])) + more


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
