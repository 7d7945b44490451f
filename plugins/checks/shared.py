"""Validation tasks that are training tasks, too."""

from __future__ import annotations

import warnings
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.envs.tasks import COLUMN, HELD_OUT_SPLITS, Task
from verl_turnkey.plugins.checks.files import columns, listed, rows


def shared_tasks(config: DictConfig) -> tuple[int, int]:
    """How many validation tasks training draws from, too, and how many there are.

    A task is its environment, arguments and seed. An environment of :data:`HELD_OUT_SPLITS` has a finite set of tasks
    in each split, whatever the seed: there a validation task counts whose split training uses.
    """
    train, val = (_starts(config, key) for key in ("train_files", "val_files"))
    known = set(train)
    return sum(start in known for start in val), len(val)


def warn_of_shared(config: DictConfig) -> None:
    """Warn where validation does not measure what was not trained."""
    if config.trainer.test_freq is None or (config.trainer.test_freq <= 0 and not config.trainer.val_before_train):
        return
    shared, total = shared_tasks(config)
    if shared:
        warnings.warn(
            f"{shared} of {total} validation tasks are of those that training draws from (data.val_files, "
            'data.train_files): write them with another split, as in `turnkey tasks --kwargs \'{"split": "train"}\' '
            '--val-kwargs \'{"split": "test"}\'`, or with other seeds',
            stacklevel=2,
        )


def _starts(config: DictConfig, key: str) -> list[tuple[str, str, int]]:
    node = OmegaConf.select(config, "turnkey.env") or {}
    defaults, own = OmegaConf.to_container(node.get("kwargs") or OmegaConf.create()), node.get("id")
    starts = []
    for file in listed(config, key):
        if not Path(file).expanduser().is_file() or COLUMN not in columns(file):
            continue
        for (text,) in rows(file, [COLUMN]):
            if text is None:  # a row of another agent loop
                continue
            task = Task.from_json(text)
            env_id = task.env_id or own
            kwargs = {**defaults, **task.kwargs} if isinstance(defaults, dict) else task.kwargs
            seed = 0 if env_id in HELD_OUT_SPLITS else task.seed
            starts.append((str(env_id), Task("", 0, kwargs).to_json(), seed))
    return starts
