"""Validation tasks that are training tasks, too."""

from __future__ import annotations

import json
from collections import Counter
from functools import lru_cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.envs.tasks import COLUMN, HELD_OUT_SPLITS, Task
from verl_turnkey.plugins.checks.files import columns, listed, rows
from verl_turnkey.plugins.checks.findings import warn


def shared_tasks(config: DictConfig) -> tuple[int, int]:
    """How many validation tasks training draws from, too, and how many there are.

    A task is its environment, arguments and seed. An environment of :data:`HELD_OUT_SPLITS` has a finite set of tasks
    in each split, whatever the seed: there a validation task counts whose split training uses.
    """
    train, val = (_of_config(config, key) for key in ("train_files", "val_files"))
    known = set(train)
    return sum(start in known for start in val), len(val)


def task_environments(config: DictConfig) -> Counter[str]:
    """Environment ids in the local training files, with their number of tasks; empty when there are none to read."""
    return Counter(name for name, _, _ in _of_config(config, "train_files"))


def warn_of_shared(config: DictConfig) -> None:
    """Warn where validation does not measure what was not trained."""
    if config.trainer.test_freq is None or (config.trainer.test_freq <= 0 and not config.trainer.val_before_train):
        return
    shared, total = shared_tasks(config)
    if shared:
        warn(
            "validation-tasks-trained",
            f"{shared} of {total} validation tasks are of those that training draws from (data.val_files, "
            'data.train_files): write them with another split, as in `turnkey tasks --kwargs \'{"split": "train"}\' '
            '--val-kwargs \'{"split": "test"}\'`, or with other seeds',
        )


def _of_config(config: DictConfig, key: str) -> list[tuple[str, str, int]]:
    """:func:`_starts` of ``data.<key>``."""
    node = OmegaConf.select(config, "turnkey.env") or {}
    kwargs = json.dumps(OmegaConf.to_container(node.get("kwargs") or OmegaConf.create()), sort_keys=True)
    return _starts(_local(config, key), node.get("id"), kwargs)


def _local(config: DictConfig, key: str) -> tuple[tuple[str, int], ...]:
    """The files of ``data.<key>`` with tasks that are on this machine, each with the time of its last change."""
    paths = [(file, Path(file).expanduser()) for file in listed(config, key)]
    return tuple((file, path.stat().st_mtime_ns) for file, path in paths if path.is_file() and COLUMN in columns(file))


@lru_cache(maxsize=2)  # warnings and the header count the same
def _starts(files: tuple[tuple[str, int], ...], env_id: str | None, kwargs: str) -> list[tuple[str, str, int]]:
    """Environment, arguments and seed of each task; ``env_id``, ``kwargs`` (JSON): the configuration's defaults."""
    defaults, starts = json.loads(kwargs), []
    for file, _ in files:
        for (text,) in rows(file, [COLUMN]):
            if text is None:  # a row of another agent loop
                continue
            task = Task.from_json(text)
            name = task.env_id or env_id
            arguments = Task("", 0, {**defaults, **task.kwargs}).to_json()
            starts.append((str(name), arguments, 0 if name in HELD_OUT_SPLITS else task.seed))
    return starts
