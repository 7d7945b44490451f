"""The tasks of ``turnkey eval``: drawn for an environment, taken from an agent's data, or those of a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from glob import glob
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import whole_file

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl_turnkey.envs.panels import Panel
    from verl_turnkey.plugins.cli.launch import Played
    from verl_turnkey.plugins.cli.run_folder import RunFolder


def task_file(tasks: str, played: Played, folder: Path, val_files: Sequence[str] = ()) -> Path:
    """The file of tasks. A number of them is written to ``folder``.

    Those of an environment get seeds that no training task has; those of an agent are the first of ``val_files``.
    """
    from verl_turnkey.envs import make
    from verl_turnkey.envs.tasks import HELD_OUT, Task, held_out_seeds, write_parquet
    from verl_turnkey.plugins.checks.probe import first_task

    if not tasks.isdecimal():
        file = Path(tasks).expanduser().absolute()
        if not file.is_file():
            raise ConfigError(f"--tasks {tasks}: expected a number of tasks or an existing parquet file")
        if not played.agent and (env_id := first_task(str(file)).env_id) != played.id:
            raise ConfigError(f"{file} holds tasks of {env_id!r}, not of {played.id!r}")
        return file
    if not 1 <= int(tasks) <= HELD_OUT:
        raise ConfigError(f"--tasks {tasks}: expected 1 to {HELD_OUT} tasks, or a parquet file")
    file = folder / "tasks.parquet"
    if played.agent:
        _write_first(int(tasks), val_files, file)
        return file
    own = played.held_out("test")
    make(played.id, {**played.kwargs, **own}).close()
    write_parquet(file, [Task(played.id, seed, own) for seed in held_out_seeds(int(tasks))], played.name, "test")
    return file


def panel_file(panel: Panel, config: DictConfig, folder: Path) -> Path:
    """Write the tasks of ``panel`` to ``folder``, after a look at the start of each."""
    from verl_turnkey.plugins.checks.data import check_starts
    from verl_turnkey.plugins.checks.findings import collecting
    from verl_turnkey.plugins.config.playing import places

    tasks = panel.tasks(places(config))
    with collecting(config):
        check_starts(panel, tasks, places(config))
    panel.write_parquet(folder / "tasks.parquet", tasks)
    return folder / "tasks.parquet"


def _write_first(number: int, val_files: Sequence[str], file: Path) -> None:
    """Write the first ``number`` rows of ``val_files``, patterns as verl reads them, or all if there are fewer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = list(islice(_rows(val_files), number))
    if not rows:
        raise ConfigError(
            f"--tasks {number}: the tasks of an agent are the first of data.val_files, and there are none in "
            f"{', '.join(val_files) or 'it'}: give --tasks FILE, or data.val_files=FILE"
        )
    with whole_file(file) as part:
        pq.write_table(pa.Table.from_pylist(rows), part)


def _rows(patterns: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of those files that are on this machine."""
    from verl_turnkey.plugins.checks.files import columns, rows

    for file in (file for pattern in patterns for file in sorted(glob(pattern, recursive=True))):
        names = columns(file)
        yield from (dict(zip(names, values, strict=True)) for values in rows(file, names))


def counted(config: DictConfig, tasks: Path, trained: RunFolder | None, samples: int) -> str:
    """The number of tasks, and how many of them the run trained on."""
    from omegaconf import OmegaConf

    from verl_turnkey.envs.tasks import task_of
    from verl_turnkey.plugins.checks.files import shared_tasks
    from verl_turnkey.plugins.eval.schedule import read_rows

    of_training = trained.task_files("train") if trained else []
    if config.turnkey.agent.run:
        known = [task_of(row) for row in _rows(of_training)]
        rows = read_rows(tasks, agent=True)
        shared, total = sum(task_of(row) in known for row in rows), len(rows)
    else:
        files = {"train_files": of_training, "val_files": [str(tasks)]}
        shared, total = shared_tasks(OmegaConf.create({"data": files, "turnkey": {"env": config.turnkey.env}}))
    of_run = f"; the run trained on {shared or 'none'} of them" if trained else ""
    return f"tasks     {total}, {samples} sample{'s' * (samples > 1)} per task ({tasks}){of_run}"
