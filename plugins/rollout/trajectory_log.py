"""The trajectory log: one JSON line per episode, with observations, responses, actions and records."""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from verl_turnkey.envs.registry import spec_of
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.rollout.writer import Writer


class JsonLines:
    """Appends to ``<folder>/episodes-<host>-<process>.jsonl``, a whole line or nothing."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"episodes-{socket.gethostname()}-{os.getpid()}.jsonl"
        self._file: FileIO | None = None
        self._end: int | None = None  # position after the last whole line

    def __call__(self, line: Mapping[str, Any]) -> None:
        """Raises OSError when the line cannot be written; the next one may."""
        text = (json.dumps(line, default=_plain) + "\n").encode()
        if self._file is None:
            self._file = self._open()
        assert self._end is not None
        try:
            rest = memoryview(text)
            while rest:  # a nearly full disk may write only a part
                rest = rest[self._file.write(rest) :]
        except OSError:
            # Cut off the half line now, or else before the next line is written; that opens the file again.
            file, self._file = self._file, None
            with suppress(OSError), file:
                file.truncate(self._end)
            raise
        self._end += len(text)

    def _open(self) -> FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = FileIO(self._path, "a+")
        try:
            if self._end is None:  # an earlier process with the same id may have died while writing
                self._end = _whole_lines(file)
            file.truncate(self._end)
        except OSError:
            file.close()
            raise
        return file


class TrajectoryLog:
    """Logs episodes below ``folder``; does nothing when it is None."""

    def __init__(self, folder: str | None) -> None:
        self._writer = Writer(JsonLines(Path(folder)), "episodes of turnkey.log.trajectories") if folder else None

    def write(
        self,
        row: Mapping[str, Any],
        task: Task | None,
        outputs: Sequence[Any],
        turns: Sequence[Mapping[str, Any]],
        failed: str | None,
    ) -> None:
        """Log one episode; never waits for the disk.

        Args:
            row: the data row, with ``uid``, ``session_id`` and ``global_steps``.
            task: the task with the arguments of the configuration; None: it could not be read.
            outputs: the rows that verl gets; their keys are ``{uid}_{session_id}_{index}``.
            turns: observation and response of each step, also of a failed episode.
            failed: the reason, or None.
        """
        if self._writer is None:
            return
        extra_info = row.get("extra_info") or {}
        self._writer.put(
            {
                "key": f"{row['uid']}_{row['session_id']}",
                "global_step": int(row["global_steps"]),
                "split": extra_info.get("split") if isinstance(extra_info, Mapping) else None,
                "task": row.get("turnkey_task"),
                "env": task,
                "failed": failed,
                "records": [output.extra_fields["turnkey"] for output in outputs],
                "turns": list(turns),
                "info": dict(outputs[-1].extra_fields["reward_extra_info"]),
            }
        )

    def drain(self, seconds: float) -> bool:
        """Wait until all is written or lost; False: it took longer than ``seconds``."""
        return self._writer is None or self._writer.drain(seconds)


def _plain(value: Any) -> Any:
    """A task as a dict: the environment, its package and version (read from disk), and the seed."""
    if isinstance(value, Task):
        return {**spec_of(value.env_id, value.kwargs), "seed": value.seed}
    raise TypeError(f"an episode to log holds a {type(value).__name__}")


def _whole_lines(file: FileIO) -> int:
    """Where the last whole line ends."""
    if not file.seek(0, os.SEEK_END):
        return 0
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
        return text.rfind(b"\n") + 1
