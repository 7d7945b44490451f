"""One JSON line per episode, for people and for tests: what was seen, written, done and recorded."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from verl_turnkey.envs.registry import spec_of
from verl_turnkey.envs.tasks import Task

logger = logging.getLogger(__name__)


class TrajectoryLog:
    """Appends to ``<folder>/episodes-<host>-<process>.jsonl``; does nothing when ``folder`` is None."""

    def __init__(self, folder: str | None) -> None:
        self._folder = Path(folder) if folder else None
        self._file: IO[str] | None = None

    def write(
        self,
        row: Mapping[str, Any],
        task: Task | None,
        outputs: Sequence[Any],
        turns: Sequence[Mapping[str, Any]],
        failed: str | None,
    ) -> None:
        """Log one episode.

        Args:
            row: the data row, with ``uid``, ``session_id`` and ``global_steps``.
            task: what was played, with the arguments of the configuration; None: it could not be read.
            outputs: the rows that verl gets; their keys are ``{uid}_{session_id}_{index}``.
            turns: what was seen and written in each step that was played, also of a failed episode.
            failed: the reason, or None.
        """
        if self._folder is None:
            return
        extra_info = row.get("extra_info") or {}
        line = {
            "key": f"{row['uid']}_{row['session_id']}",
            "global_step": int(row["global_steps"]),
            "split": extra_info.get("split") if isinstance(extra_info, Mapping) else None,
            "task": row.get("turnkey_task"),
            "env": None if task is None else {**spec_of(task.env_id, task.kwargs), "seed": task.seed},
            "failed": failed,
            "records": [output.extra_fields["turnkey"] for output in outputs],
            "turns": list(turns),
            "info": dict(outputs[-1].extra_fields["reward_extra_info"]),
        }
        try:
            self._append(json.dumps(line) + "\n")
        except OSError as error:  # a full disk costs the log, not the episode
            logger.warning("turnkey.log.trajectories: no more episodes are logged in this process: %s", error)
            self._folder = None

    def _append(self, text: str) -> None:
        assert self._folder is not None
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            name = f"episodes-{socket.gethostname()}-{os.getpid()}.jsonl"
            self._file = (self._folder / name).open("a", encoding="utf-8", buffering=1)
        self._file.write(text)
