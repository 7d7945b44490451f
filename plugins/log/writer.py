"""The files of the trajectory log: starts of the run, and tables, which a daemon thread writes as parquet files.

While a disk is full the rows written are lost; while a mount hangs those for which there is no room. Neither ever
stops the caller. Lost rows are counted, and the log says when a loss begins and how much was lost.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from queue import Empty, SimpleQueue
from sys import getsizeof
from time import monotonic, perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_turnkey.advantage.text_files import whole_file, write_text
from verl_turnkey.plugins.log.schema import TABLES, families, schema
from verl_turnkey.plugins.notices import logger

if TYPE_CHECKING:
    import pyarrow as pa


EXIT_SECONDS = 5.0
"""for which a process that ends waits for its rows"""


Rows = tuple[str, int, Mapping[str, Sequence[Any]]]
"""table, step, and column -> values"""


class _Item(NamedTuple):
    make: Callable[[], Iterable[Rows]]
    count: int
    size: int


class Counts(NamedTuple):
    """Rows that a process wrote and lost, and the seconds that writing took in its thread, since its start."""

    written: int = 0
    lost: int = 0
    seconds: float = 0.0


@dataclass
class _File:
    """What the next file of a table and a step will hold."""

    due: float
    parts: list[pa.Table] = field(default_factory=list)
    size: int = 0


class Tables:
    """Writes rows of tables below ``folder``, in files ``<table>/step=000012/<segment>-<process>-<n>.parquet``.

    Args:
        folder: of the log; made when the first rows are written, for its owner alone.
        segment: which start of the trainer this is, see :func:`new_segment`.
        process: who writes, unlike every other process of this start: ``<host>-<pid>``, ``trainer``, ``rank3``.
        most_bytes: how much may wait for the disk, estimated; further rows are lost.
        most_puts: after which a file is written.
        seconds: after which a file is written.
        also: called in the thread with all rows of a put, as (table, step, rows).
    """

    def __init__(
        self,
        folder: str | Path,
        segment: str,
        process: str,
        *,
        most_bytes: int = 64 << 20,
        most_puts: int = 64,
        seconds: float = 30.0,
        also: Callable[[Sequence[tuple[str, int, pa.Table]]], None] | None = None,
    ) -> None:
        self._folder, self._name = Path(folder), segment + "-" + re.sub(r"[^\w.-]", "_", process)
        self._most_bytes, self._most_puts, self._seconds, self._also = most_bytes, most_puts, seconds, also
        self._queue: SimpleQueue[_Item | threading.Event] = SimpleQueue()
        self._lock = threading.Lock()  # of the next four and of starting the thread
        self.written = 0
        """rows that are on the disk"""
        self.lost = 0
        """rows that never will be"""
        self._waiting = 0  # bytes
        self._outage = 0  # rows lost since a file was last written
        self.seconds = 0.0
        """spent on writing, in the thread"""
        self._thread: threading.Thread | None = None
        # Of the thread alone:
        self._files: dict[tuple[str, int], _File] = {}
        self._newest: dict[str, int] = {}
        self._further: dict[str, tuple[str, ...]] = {}
        self._refused: set[str] = set()
        self._number = 0

    def put(self, table: str, step: int, rows: Mapping[str, Sequence[Any]]) -> None:
        """Have rows written; never waits.

        Args:
            table: of :data:`~verl_turnkey.plugins.log.schema.TABLES`.
            step: the partition.
            rows: column -> values, all equally many; nobody changes them later. A column that is not there is null.
        """
        if count := len(next(iter(rows.values()), ())):
            self.put_later(lambda: [(table, step, rows)], count, sum(map(_bytes, rows.values())))

    @property
    def room(self) -> int:
        """Bytes that may still wait."""
        with self._lock:
            return self._most_bytes - self._waiting

    def put_later(self, make: Callable[[], Iterable[Rows]], count: int, size: int) -> None:
        """Have ``count`` rows written that ``make`` makes in the thread, all or none; never waits.

        ``size``: bytes that they take until then, roughly.
        """
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"tables of {self._folder}", daemon=True)
                self._thread.start()
                atexit.register(self.drain, EXIT_SECONDS)
            room = self._waiting + size <= self._most_bytes
            self._waiting += size * room
        if room:
            self._queue.put(_Item(make, count, size))
        else:
            self._lose(count, f"writing hangs, and {self._most_bytes >> 20} MB wait")

    @property
    def counts(self) -> Counts:
        return Counts(self.written, self.lost, self.seconds)

    def drain(self, seconds: float) -> bool:
        """Wait until everything that was put is on the disk or lost; False: it took longer than ``seconds``."""
        if self._thread is None:
            return True
        done = threading.Event()
        self._queue.put(done)
        return done.wait(seconds)

    def _run(self) -> None:
        while True:
            due = min((file.due for file in self._files.values()), default=None)
            item: _Item | threading.Event | None = None
            with suppress(Empty):
                item = self._queue.get(timeout=None if due is None else max(0.0, due - monotonic()))
            started = perf_counter()
            if isinstance(item, _Item):
                self._take(item)
            now = monotonic()
            everything = isinstance(item, threading.Event)
            for key in [key for key, file in self._files.items() if everything or file.due <= now]:
                self._write(*key)
            self.seconds += perf_counter() - started
            if isinstance(item, threading.Event):
                item.set()

    def _take(self, item: _Item) -> None:
        """Add rows to the next files of their tables and steps, and write what is full or of a step that is over."""
        try:
            made = list(item.make())
            parts = [(table, step, self._arrow(table, rows)) for table, step, rows in made]
        except Exception as error:  # rows that are none of the table cost themselves
            with self._lock:
                self.lost += item.count
                self._waiting -= item.size
            message = f"{type(error).__name__}: {error}"
            if message not in self._refused:
                self._refused.add(message)
                logger.warning("rows of turnkey.log.trajectories cannot be written: %s", message)
            return
        if self._also is not None:
            with suppress(Exception):  # costs traces, not the log
                self._also(parts)
        with self._lock:
            self._waiting += sum(part.nbytes for _, _, part in parts) - item.size
        for table, step, part in parts:
            if step > self._newest.get(table, -1):  # only once: rows of earlier steps may still come
                self._newest[table] = step
                for key in [key for key in self._files if key[0] == table]:
                    self._write(*key)
            file = self._files.setdefault((table, step), _File(monotonic() + self._seconds))
            file.parts.append(part)
            file.size += part.nbytes
            if len(file.parts) >= self._most_puts or file.size >= self._most_bytes // 4:
                self._write(table, step)

    def _arrow(self, table: str, rows: Mapping[str, Sequence[Any]]) -> pa.Table:
        import pyarrow as pa

        if table not in TABLES:
            raise ValueError(f"there is no table {table!r}")
        earlier = self._further.get(table, ())
        of_rows = tuple(name for name in rows if name.startswith(families(table)))
        further = tuple(dict.fromkeys((*earlier, *of_rows)))
        fields = schema(table, further)
        columns = {}
        for name, values in rows.items():
            if name not in fields.names:
                raise ValueError(f"the table {table!r} has no column {name!r}")
            try:
                columns[name] = _array(values, fields.field(name).type)
            except (TypeError, ValueError, OverflowError) as error:
                raise ValueError(f"{table}.{name}: {error}") from error
        part = pa.table(columns)
        self._further[table] = further
        return part

    def _write(self, table: str, step: int) -> None:
        file = self._files.pop((table, step))
        count = sum(len(part) for part in file.parts)
        try:
            self._to_disk(table, step, file.parts)
        except Exception as error:  # whatever the disk does; the next file may be written
            with self._lock:
                self._waiting -= file.size
            self._lose(count, f"{type(error).__name__}: {error}")
            return
        with self._lock:
            self._waiting -= file.size
            self.written += count
            outage, self._outage = self._outage, 0
        if outage:
            logger.warning(
                "rows of turnkey.log.trajectories are written again; %d were lost, %d in all", outage, self.lost
            )

    def _to_disk(self, table: str, step: int, parts: list[pa.Table]) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        rows = pa.concat_tables(parts, promote_options="default")
        # pandas takes the columns of a folder from its first file: every file has all that are known.
        fields = schema(table, self._further.get(table, ()))
        columns = [rows[f.name] if f.name in rows.column_names else pa.nulls(len(rows), f.type) for f in fields]
        folder = private(self._folder, table, f"step={step:06d}")
        while (path := folder / f"{self._name}-{self._number}.parquet").exists():
            self._number += 1
        with whole_file(path) as part:
            parquet.write_table(pa.table(columns, schema=fields), part, compression="zstd")
        self._number += 1

    def _lose(self, count: int, reason: str) -> None:
        with self._lock:
            self.lost += count
            first = self._outage == 0
            self._outage += count
        if first:
            logger.warning(
                "rows of turnkey.log.trajectories are not written on %s until this is over: %s",
                *(socket.gethostname(), reason),
            )


def _bytes(values: Sequence[Any]) -> int:
    size = getattr(values, "nbytes", None)
    return sum(map(getsizeof, values)) + 8 * len(values) if size is None else int(size)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    import pyarrow as pa

    try:
        return pa.array(values, kind)
    except UnicodeError:  # half a pair of surrogates, which a model's or an environment's text may hold
        texts = (text and str(text).encode("utf-8", "backslashreplace").decode() for text in values)
        return pa.array(list(texts), kind)


SEGMENT = re.compile(r"\d{8}T\d{6}_[0-9a-f]{4}")
UNNAMED = "00000000T000000_0000"
"""of a run whose driver has named none"""


def new_segment(folder: str | Path | None = None) -> str:
    """A name for a start of the trainer: its UTC time and four random digits, behind those in the log ``folder``."""
    names = (path.stem for path in Path(folder, "segments").glob("*.json")) if folder else ()
    return f"{behind(names, '%Y%m%dT%H%M%S', datetime.now(timezone.utc))}_{secrets.token_hex(2)}"


def behind(names: Iterable[str], form: str, now: datetime) -> str:
    """The time ``now`` as a name that sorts behind ``names``, which may be those of a machine whose clock is ahead."""
    stamp, ahead = f"{now:{form}}", []
    for name in names:
        with suppress(ValueError):  # it says no time
            if name >= stamp:
                ahead.append(datetime.strptime(name[: len(stamp)], form) + timedelta(seconds=1))
    return f"{max(ahead):{form}}" if ahead else stamp


def write_segment(folder: Path, segment: str, facts: Mapping[str, Any]) -> None:
    """Write ``segments/<segment>.json``; ``facts["resumed_from"]``: the last step that it takes over, 0 for none.

    Raises:
        OSError: it cannot be written.
    """
    write_json(private(folder, "segments") / f"{segment}.json", {"segment": segment, **facts})


def look_for(process: Any, folder: str, segment: str) -> None:
    """Run inside a process of the run: warn if its machine does not see the trainer's log, or may not write there.

    Nobody waits for that, since a mount may hang.
    """
    threading.Thread(target=look, args=(Path(folder), segment), name="look for the log", daemon=True).start()


def look(folder: Path, segment: str) -> None:
    path, is_private = folder / "segments" / f"{segment}.json", False
    try:
        is_there = path.exists()
    except PermissionError:  # the folder belongs to another user
        is_there = is_private = True
    if not is_there:
        logger.warning(
            "turnkey.log.trajectories: %s, which the trainer writes, is not to be seen on %s, where its part of "
            "the log stays: choose a folder that all nodes share",
            *(path, socket.gethostname()),
        )
    elif is_private or not os.access(folder, os.W_OK | os.X_OK):
        logger.warning(
            "turnkey.log.trajectories: %s is not writable on %s, whose part of the log is lost: make it writable "
            "there, or choose a folder that all nodes can write",
            *(folder, socket.gethostname()),
        )


def read_segments(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> what stands in its file, the earliest first; a file that cannot be read is left out."""
    segments = {}
    for path in sorted((folder / "segments").glob("*.json")):
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(facts, dict) and SEGMENT.fullmatch(path.stem):
            segments[path.stem] = facts
    return segments


def sha256(path: Path) -> str:
    """Of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file as a whole."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=True, default=str) + "\n")


def private(folder: Path, *below: str) -> Path:
    """``folder/below/...``; folders that are made are their owner's alone, since texts of users may be in the log."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for name in ("", *below):
        folder = folder / name
        folder.mkdir(0o700, exist_ok=True)
    return folder
