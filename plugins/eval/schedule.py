"""The schedule of an evaluation: finds the missing samples, plays them concurrently, and writes the result."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import write_text
from verl_turnkey.envs.tasks import COLUMN, Task, open_parquet, task_of
from verl_turnkey.plugins.eval.identity import without_secrets
from verl_turnkey.plugins.eval.result import result
from verl_turnkey.plugins.eval.samples import RESULT, Samples

ATTEMPTS = 3
"""most episodes for a sample whose episodes fail"""
Play = Callable[[str, Mapping[str, Any]], Awaitable["dict[str, Any] | str"]]


@dataclass(frozen=True)
class Job:
    """A sample to play."""

    key: str
    task: int
    """index of the task"""
    number: int
    """index of the sample among those of its task"""
    row: Mapping[str, Any]
    """the data row for the agent loop"""


def read_rows(file: Path, agent: bool = False) -> list[dict[str, Any]]:
    """The rows of a file of tasks, as verl's data set passes them to the agent loop, without repeated tasks.

    Args:
        agent: the tasks are for the user's own agent; a task without a text is described by what the agent gets.

    Raises:
        ConfigError, TaskFormatError: the file holds something else.
    """
    table = open_parquet(file).read()
    if COLUMN not in table.column_names and not agent:
        raise ConfigError(f"{file} has no column {COLUMN!r}: `turnkey tasks` writes files of tasks")
    rows: dict[str, dict[str, Any]] = {}
    for row in table.to_pylist():
        row["raw_prompt"] = row.pop("prompt", [])
        if agent:
            row[COLUMN] = json.dumps(task_of(row), sort_keys=True)
        else:
            Task.from_json(row[COLUMN])
        rows.setdefault(row[COLUMN], row)
    return list(rows.values())


def jobs(rows: Sequence[Mapping[str, Any]], samples: int, kept: Samples) -> list[Job]:
    """The unfinished samples, beginning with the first sample of every task."""
    missing = []
    for number in range(samples):
        for place, row in enumerate(rows):
            key = kept.key(row[COLUMN], number)
            if key not in kept.done:
                names = {"uid": f"{kept.id}-{place}", "session_id": number}
                missing.append(Job(key, place, number, {**row, **names}))
    return missing


async def play_all(
    todo: Sequence[Job],
    play: Play,
    kept: Samples,
    *,
    concurrency: int,
    check: Callable[[], None] = lambda: None,
    advance: Callable[[bool | None], None] = lambda success: None,
) -> list[dict[str, Any]]:
    """Play ``todo``; each finished sample is stored immediately.

    Args:
        play: see :meth:`verl_turnkey.plugins.eval.player.Player.play`.
        check: called after a failure; raises if no further sample can succeed.
        advance: called after each sample with its success, or None if it failed.

    Returns:
        The samples that failed in all attempts, with the last reason.
    """
    waiting, failures = iter(todo), []

    async def work() -> None:
        for job in waiting:
            for attempt in range(ATTEMPTS):
                # The trajectory log has an episode for each attempt.
                again = {"session_id": f"{job.number}-{attempt}"} if attempt else {}
                outcome = await play(job.key, {**job.row, **again})
                if not isinstance(outcome, str):
                    break
                check()
            named = {"task": job.task, "sample": job.number, "seed": json.loads(job.row[COLUMN]).get("seed")}
            if isinstance(outcome, str):
                failures.append({"key": job.key, **named, "reason": outcome})
            else:
                kept.add(job.key, {**named, **outcome})
            advance(None if isinstance(outcome, str) else outcome["success"])

    workers = [asyncio.ensure_future(work()) for _ in range(min(concurrency, len(todo)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return failures


def finish(
    kept: Samples,
    rows: Sequence[Mapping[str, Any]],
    samples: int,
    failures: Sequence[Mapping[str, Any]],
    panel: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Write the result of the finished samples to ``result.json`` and return it; ``panel``: its name and hash."""
    finished = {
        place: [kept.done[key] for number in range(samples) if (key := kept.key(row[COLUMN], number)) in kept.done]
        for place, row in enumerate(rows)
    }
    tasks = [without_secrets(json.loads(row[COLUMN])) for row in rows]
    summary = {"eval_id": kept.id, "panel": panel, **result(finished, failures, tasks=tasks, samples_per_task=samples)}
    write_text(kept.folder / RESULT, json.dumps(summary, indent=1) + "\n")
    return summary
