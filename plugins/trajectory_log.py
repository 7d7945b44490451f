"""One JSON line per episode, for people and for tests: what was seen, written, done and recorded."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any


class TrajectoryLog:
    """Appends to ``<folder>/episodes-<host>-<process>.jsonl``; does nothing when ``folder`` is None."""

    def __init__(self, folder: str | None) -> None:
        self._folder = Path(folder) if folder else None
        self._file: IO[str] | None = None

    def write(
        self,
        row: Mapping[str, Any],
        outputs: Sequence[Any],
        texts: Sequence[tuple[str, str]],
        failed: str | None,
    ) -> None:
        """Log one episode.

        Args:
            row: the data row, with ``uid``, ``session_id`` and ``global_steps``.
            outputs: the rows that verl gets; their keys are ``{uid}_{session_id}_{index}``.
            texts: (observation, model's text) of each step that was played, also of a failed episode.
            failed: the reason, or None.
        """
        if self._folder is None:
            return
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"episodes-{socket.gethostname()}-{os.getpid()}.jsonl"
            self._file = (self._folder / name).open("a", encoding="utf-8", buffering=1)
        extra_info = row.get("extra_info") or {}
        line = {
            "key": f"{row['uid']}_{row['session_id']}",
            "global_step": int(row["global_steps"]),
            "split": extra_info.get("split") if isinstance(extra_info, Mapping) else None,
            "task": row.get("turnkey_task"),
            "failed": failed,
            "records": [output.extra_fields["turnkey"] for output in outputs],
            "turns": [{"observation": observation, "text": text} for observation, text in texts],
            "info": dict(outputs[-1].extra_fields["reward_extra_info"]),
        }
        self._file.write(json.dumps(line) + "\n")
