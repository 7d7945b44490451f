"""Checks of the data: whether verl can read the files, and the task of every row."""

from __future__ import annotations

from collections.abc import Sequence
from glob import escape, glob
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.envs.errors import MissingPackageError, TaskFormatError
from verl_turnkey.envs.registry import check_call
from verl_turnkey.envs.tasks import COLUMN, Task, task_of
from verl_turnkey.plugins.checks.cells import check_cells
from verl_turnkey.plugins.checks.files import FORMATS, LOOP_COLUMN, columns, listed, patterns, rows, shared_tasks, taken
from verl_turnkey.plugins.checks.findings import Refusal, refusal, refuse, warn
from verl_turnkey.plugins.checks.harbor import check_harbor
from verl_turnkey.plugins.checks.paths import absent
from verl_turnkey.plugins.config.overrides import override
from verl_turnkey.plugins.config.schema import TurnkeyConfig, closest
from verl_turnkey.plugins.verl_api.internals import own_manager


def check_data(config: DictConfig, turnkey: TurnkeyConfig, loops: Sequence[str]) -> list[str]:
    """Refuse data that the run could not use; returns the local training files.

    ``loops``: names of the known agent loops. Files that are not on this machine are not read, nor are those of a
    dataset class of the user's own (``data.custom_cls``).
    """
    if path := (config.data.get("custom_cls") or {}).get("path"):
        if "://" not in path and not Path(path).expanduser().is_file():
            absent(config, f"data.custom_cls.path={path}: there is no such file")
        return []
    local: dict[str, list[str]] = {}
    for key in ("train_files", "val_files"):
        files = listed(config, key)
        if not files:
            unused = ", also for a run that never validates (the training file will do)" if key == "val_files" else ""
            refuse("data-file-missing", key=key, unused=unused)
            continue
        for name in patterns(config, key):
            if Path(name).is_file() and not glob(name):  # verl would read no file
                refuse("data-brackets", key=key, name=name, argument=override(f"data.{key}", escape(name)))
        local[key] = [file for file in files if _readable(config, f"data.{key}", file)]
        _check_named(f"data.{key}", local[key])
        number = sum(_check_file(config, turnkey, f"data.{key}", file, loops) for file in local[key])
        if len(local[key]) == len(files):  # else some are elsewhere and cannot be counted
            _check_number(config, key, number)
    return local["train_files"]


def _readable(config: DictConfig, key: str, file: str) -> bool:
    """Whether ``file`` is on this machine; refused if it should be and is not, or if verl could not read it."""
    path, setting = Path(file).expanduser(), f"{key}={file}"
    if path.suffix not in FORMATS:
        refuse("data-format", key=key, file=file, formats=", ".join(FORMATS), suffix=path.suffix or "no suffix")
        return False
    if "://" in file:
        return False
    if file.startswith("~"):
        refuse("data-tilde", key=key, file=file, path=path)
        return False
    if not path.is_file():
        absent(config, f"{setting}: there is no such file; `turnkey tasks` writes them")
        return False
    try:
        columns(file)
    except Exception as error:
        refuse("data-unreadable", key=key, file=file, suffix=path.suffix, kind=type(error).__name__, error=error)
        return False
    return True


def _check_named(key: str, files: Sequence[str]) -> None:
    """Refuse a column of agent loops in some files only: verl joins them, and rows without an entry have no loop."""
    file_by_presence = {LOOP_COLUMN in columns(file): file for file in files}
    if len(file_by_presence) > 1:
        refuse("agent-name-in-some-files", key=key, with_column=file_by_presence[True], without=file_by_presence[False])


def without_tasks(file: str, file_columns: Sequence[str]) -> Refusal:
    """The error for a file that has the columns ``file_columns`` but not the one with the tasks."""
    return refusal("task-column-missing", file=file, columns=", ".join(file_columns))


def _check_file(config: DictConfig, turnkey: TurnkeyConfig, key: str, file: str, loops: Sequence[str]) -> int:
    """Check all rows of a local file; returns their number."""
    file_columns, prompt = columns(file), str(config.data.prompt_key)
    if file_columns and prompt not in file_columns:
        refuse("prompt-column-missing", key=key, file=file, prompt=prompt, closest=closest(prompt, file_columns))
    default = str(config.actor_rollout_ref.rollout.agent.default_agent_loop)
    own_loops = own_manager(config) is not None
    checked: set[tuple[str, ...]] = set()
    read_columns = [column for column in (LOOP_COLUMN, COLUMN) if column in file_columns]
    number, loops_of_rows = 0, set[str]()
    for number, values in enumerate(rows(file, read_columns or file_columns[:1]), start=1):
        row = dict(zip(read_columns, values, strict=False))
        loop, where = row.get(LOOP_COLUMN, default), f"{key}={file}, row {number - 1}"
        loops_of_rows.add(str(loop))
        if loop not in loops and not own_loops:
            refuse("unknown-agent-name", where=where, loop=loop, closest=closest(str(loop), list(loops)))
        if loop == "turnkey_agent" and COLUMN in row and turnkey.agent.run is not None:
            try:
                task_of(row)
            except TaskFormatError as error:
                raise TaskFormatError(f"{where}: {error}") from error
            check_harbor(turnkey.agent, where, row[COLUMN])
        if loop != "turnkey_env":
            continue
        if COLUMN not in row:
            raise without_tasks(file, file_columns)
        _check_task(turnkey, where, row[COLUMN], checked)
    check_cells(config, turnkey, key, file, file_columns, loops_of_rows)
    return number


def _check_task(turnkey: TurnkeyConfig, where: str, text: Any, checked: set[tuple[str, ...]]) -> None:
    """Check the format of a task, and once per environment and set of argument names whether they exist."""
    try:
        task = Task.from_json(text)
    except TaskFormatError as error:
        raise TaskFormatError(f"{where}: {error}") from error
    env_id = task.env_id or turnkey.env.id
    if not env_id:
        refuse("task-without-environment", where=where)
        return
    arguments = {**turnkey.env.kwargs, **task.kwargs}
    kind = (env_id, *sorted(arguments))
    if kind in checked:
        return
    checked.add(kind)
    try:
        check_call(env_id, arguments)
    except MissingPackageError:
        if turnkey.env.probe:  # else the packages may be on the other machines only
            raise
    except (LookupError, TypeError) as error:
        refuse("task-invalid", where=where, reason=error.args[0] if error.args else error)


def _check_number(config: DictConfig, key: str, rows: int) -> None:
    """Refuse fewer tasks than a batch has: verl divides by the number of batches."""
    rows = taken(config, key, rows)
    for size in ("train_batch_size", "gen_batch_size") if key == "train_files" else ():
        batch_size = config.data.get(size)
        if batch_size and rows < batch_size:
            refuse("too-few-tasks", key=key, rows=rows, size=size, batch_size=batch_size)
    if not rows:
        refuse("no-tasks", key=key)


def warn_of_shared(config: DictConfig) -> None:
    """Warn of validation tasks that are trained on."""
    if config.trainer.test_freq is None or (config.trainer.test_freq <= 0 and not config.trainer.val_before_train):
        return
    shared, total = shared_tasks(config)
    if shared:
        warn("validation-tasks-trained", shared=shared, total=total)
