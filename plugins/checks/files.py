"""The data files of a run, as far as they are on this machine: their names, columns, rows and tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from glob import glob
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.tasks import COLUMN, HELD_OUT_SPLITS, Task, open_parquet
from verl_turnkey.plugins.log.writer import sha256
from verl_turnkey.plugins.verl_api.internals import own_manager

FORMATS = (".parquet", ".json", ".jsonl")
"""suffixes that verl reads"""
LOOP_COLUMN = "agent_name"
"""the column in which a row names its agent loop"""
ROLLOUTS = "__rollout_n__"
"""the column in which a row says how often verl plays it"""


def patterns(config: DictConfig, key: str) -> list[str]:
    """``data.<key>``, which may be one name or a list; verl reads each as a pattern (``*``, ``?``, ``[abc]``)."""
    names = config.data.get(key) or []
    return [str(name) for name in ([names] if isinstance(names, str) else names)]


def listed(config: DictConfig, key: str) -> list[str]:
    """The files of ``data.<key>``; a pattern that matches nothing here stays as it is. Empty when it is not set."""
    return [file for pattern in patterns(config, key) for file in sorted(glob(pattern, recursive=True)) or [pattern]]


def local_parquet(config: DictConfig) -> list[str]:
    """The training files in parquet, the format of `turnkey tasks`, that are on this machine."""
    files = [Path(file).expanduser() for file in listed(config, "train_files")]
    return [str(file) for file in files if file.suffix == ".parquet" and file.is_file()]


def training_loops(config: DictConfig) -> set[str]:
    """The agent loops of the training rows: those that the data name, else the default one.

    The default one, too, where files cannot be read: remote or broken ones, those of ``data.custom_cls``. A user's
    agent-loop manager stands for loops of its own, unless the default one is ``turnkey_env``.
    """
    default = {str(config.actor_rollout_ref.rollout.agent.default_agent_loop)}
    if default != {"turnkey_env"} and (manager := own_manager(config)):
        return {manager}
    loops: set[str] = set()
    for file in [] if (config.data.get("custom_cls") or {}).get("path") else listed(config, "train_files"):
        try:
            has_column = LOOP_COLUMN in columns(file)
            loops |= {str(loop) for (loop,) in rows(file, [LOOP_COLUMN])} if has_column else default
        except (OSError, ValueError):  # the checks of the data report it
            loops |= default
    return loops or default


def columns(file: str) -> list[str]:
    """The columns of a local file; of a JSON file those of its first row."""
    path = Path(file).expanduser()
    if path.suffix == ".parquet":
        return list(open_parquet(path).schema_arrow.names)
    return list(next(iter(json_rows(path)), {}))


def rows(file: str, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """The columns ``names`` of a local file, row by row."""
    path = Path(file).expanduser()
    if path.suffix != ".parquet":
        yield from (tuple(row.get(name) for name in names) for row in json_rows(path))
        return
    for batch in open_parquet(path).iter_batches(columns=list(names)):
        yield from zip(*(batch.column(name).to_pylist() for name in names), strict=True)


def tasks(config: DictConfig, key: str) -> int | None:
    """How many rows of ``data.<key>`` verl takes; None where files are elsewhere or read by a class of the user's."""
    files = [Path(file).expanduser() for file in listed(config, key)]
    if (config.data.get("custom_cls") or {}).get("path") or not all(file.is_file() for file in files):
        return None
    numbers = (int(open_parquet(f).metadata.num_rows) if f.suffix == ".parquet" else len(json_rows(f)) for f in files)
    return taken(config, key, sum(numbers))


def data_mark(config: DictConfig) -> dict[str, Any] | None:
    """Number and hashes of the training tasks, by which a checkpoint recognizes them; None as :func:`tasks`."""
    if (number := tasks(config, "train_files")) is None:
        return None
    return {"tasks": number, "files": [sha256(Path(file).expanduser()) for file in listed(config, "train_files")]}


def taken(config: DictConfig, key: str, rows: int) -> int:
    """How many of the ``rows`` in the files of ``data.<key>`` verl takes."""
    limit = config.data.get(key.replace("files", "max_samples"), -1)
    return min(rows, limit) if limit > 0 else rows


def steps_until_data_end(config: DictConfig) -> int | None:
    """Training steps in ``trainer.total_epochs``, as verl counts them; None where :func:`tasks` is.

    There are fewer where ``data.filter_overlong_prompts`` drops tasks, which is known only once verl has read them.
    """
    number = tasks(config, "train_files")
    return None if number is None else number // config.data.train_batch_size * config.trainer.total_epochs


def last_step(config: DictConfig) -> int | None:
    """The training step after which the run ends; None: where the data ends, which is unknown."""
    ends = (config.trainer.get("total_training_steps"), steps_until_data_end(config))
    return min((end for end in ends if end is not None), default=None)


def shared_tasks(config: DictConfig) -> tuple[int, int, str]:
    """How many validation tasks are also training tasks, out of how many, and what is compared.

    An environment of :data:`HELD_OUT_SPLITS` has a finite set of tasks per split, whatever the seed: there a validation
    task counts if training uses its split.
    """
    train, val = (_of_config(config, key) for key in ("train_files", "val_files"))
    trained = set(train)
    by_seed = any(name not in HELD_OUT_SPLITS for name, _, _ in val)
    compared = "environment, arguments and seed" if by_seed else "environment and arguments"
    return sum(start in trained for start in val), len(val), compared


def task_environments(config: DictConfig) -> Counter[str]:
    """Environment ids in the local training files, with their number of tasks; empty when there are none to read."""
    return Counter(name for name, _, _ in _of_config(config, "train_files"))


def _of_config(config: DictConfig, key: str) -> list[tuple[str, str, int]]:
    """:func:`_starts` of ``data.<key>``; none where an agent plays, whose tasks are its own."""
    if OmegaConf.select(config, "actor_rollout_ref.rollout.agent.default_agent_loop") == "turnkey_agent":
        return []
    node = OmegaConf.select(config, "turnkey.env") or {}
    kwargs = json.dumps(OmegaConf.to_container(node.get("kwargs") or OmegaConf.create()), sort_keys=True)
    paths = [(file, Path(file).expanduser()) for file in listed(config, key)]
    local = [(file, path) for file, path in paths if path.is_file() and COLUMN in columns(file)]
    return _starts(tuple((file, path.stat().st_mtime_ns) for file, path in local), node.get("id"), kwargs)


@lru_cache(maxsize=2)  # warnings and the header count the same
def _starts(files: tuple[tuple[str, int], ...], env_id: str | None, kwargs: str) -> list[tuple[str, str, int]]:
    """Environment, arguments and seed of each task; ``env_id``, ``kwargs`` (JSON): the configuration's defaults.

    ``files``: each with the time of its last change.
    """
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


def json_rows(path: Path) -> list[Mapping[str, Any]]:
    """The rows of a JSON file of verl's: one list of objects, or an object per line."""
    return json_objects(read_text(path, only_utf8=True))


def json_objects(text: str) -> list[Mapping[str, Any]]:
    """The rows of a JSON text, as :func:`json_rows`."""
    is_list = text.lstrip().startswith("[")
    # Not splitlines(), which also splits at U+2028, in the middle of a string.
    objects = json.loads(text) if is_list else [json.loads(line) for line in text.split("\n") if line.strip()]
    if not all(isinstance(row, dict) for row in objects):
        raise ValueError("a row is not an object")
    return objects
