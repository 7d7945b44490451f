"""Harbor task folders for ``turnkey tasks`` and ``turnkey env-check``."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from verl_turnkey.envs.agents.harbor import ENV_ID, HarborTask, check_task, find_tasks, sandbox_for
from verl_turnkey.envs.agents.sandboxes import choose
from verl_turnkey.envs.errors import TaskFormatError
from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.cli.task_rows import TaskRow, split_rows


def write_tasks(
    out: Path,
    folder: Path,
    val_folder: Path | None,
    *,
    ignore_dockerfile: bool,
    train: int | None,
    val: int | None,
    seed: int,
    data_source: str | None,
) -> list[str]:
    """Write ``train.parquet`` and ``val.parquet`` in ``out`` with the tasks in ``folder``. What was written, in words.

    ``val_folder``: the tasks of validation; None: a tenth of those in ``folder``, at most 128.
    """
    own, others = (None if path is None else _rows(path, ignore_dockerfile) for path in (folder, val_folder))
    lines = []
    for split, rows in zip(("train", "val"), split_rows(own or [], others, train, val, seed), strict=True):
        path = out / f"{split}.parquet"
        tasks = [Task(ENV_ID, 0, row.kwargs) for row in rows]
        write_parquet(path, tasks, data_source or ENV_ID, split, prompts=[row.prompt for row in rows])
        lines.append(f"{len(rows)} tasks in {path}")
    return lines


def _rows(folder: Path, ignore_dockerfile: bool) -> list[TaskRow]:
    further: dict[str, Any] = {"ignore_dockerfile": True} if ignore_dockerfile else {}
    rows = []
    for path in find_tasks(folder):
        kwargs = {"path": str(path), **further}
        rows.append(TaskRow(kwargs, prompt=HarborTask.load(**kwargs).instruction))
    return rows


def check_tasks(
    folder: Path,
    *,
    ignore_dockerfile: bool,
    as_json: bool,
    write: Callable[[str], Any],
    inherit: Collection[str] = (),
) -> bool:
    """Run each task in ``folder`` with its reference solution, with nothing, and with a reward that was planted.

    ``inherit``: as ``turnkey.agent.inherit``.

    Returns:
        whether all of them are right.
    """
    results: dict[str, list[str]] = {}
    for path in find_tasks(folder):
        try:
            task = HarborTask.load(str(path), ignore_dockerfile).filled(inherit)
            sandbox = sandbox_for(task, choose("auto", image=task.docker_image if task.needs_image else None))
            problems = asyncio.run(check_task(task, sandbox))
        except TaskFormatError as error:
            problems = [str(error)]
        results[path.name] = problems
        if not as_json:
            write(f"{path.name}: {'; '.join(problems) or 'right'}")
    if as_json:
        write(
            json.dumps([{"task": name, "ok": not problems, "problems": problems} for name, problems in results.items()])
        )
    return not any(results.values())
