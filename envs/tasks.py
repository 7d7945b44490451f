"""Tasks: which environment, which seed; and the files in which verl reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

import numpy as np

from verl_turnkey.advantage.text_files import whole_file
from verl_turnkey.envs.errors import MissingPackageError, TaskFormatError

COLUMN = "turnkey_task"
HINT = "turnkey_hint"
ROW = ("data_source", "extra_info", "reward_model")
"""fields of a data row that an agent gets where the row has no task, besides its prompt"""
_MAX_SEED = 2**31 - 1
HELD_OUT = 2**16
"""this many of the largest seeds are reserved for evaluations"""

HELD_OUT_SPLITS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "turnkey/Search-v0": {"val": {"split": "test"}, "test": {"split": "test"}},
    "turnkey/ALFWorld-v0": {"val": {"split": "valid_seen"}, "test": {"split": "valid_unseen"}},
    "turnkey/ScienceWorld-v0": {"val": {"split": "dev"}, "test": {"split": "test"}},
    "turnkey/AppWorld-v0": {
        "val": {"tasks": "data/datasets/dev.txt"},
        "test": {"tasks": "data/datasets/test_normal.txt"},
    },
}
"""of the environments with a finite set of tasks: the arguments for validation, and for an evaluation"""


@dataclass(frozen=True)
class Task:
    """One episode start: equal tasks start equal episodes."""

    env_id: str
    seed: int
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        try:
            return json.dumps(asdict(self), sort_keys=True)
        except (TypeError, ValueError) as error:
            raise TaskFormatError(f"the kwargs of {self.env_id!r} must be plain JSON values: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Task:
        """Read ``to_json``'s text back. Raises ``TaskFormatError``, which names the column and what came."""
        try:
            fields = json.loads(text)
            task = cls(fields.pop("env_id"), fields.pop("seed"), fields.pop("kwargs", None) or {})
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise _bad(text, f"{type(error).__name__}: {error}") from error
        if fields:
            raise _bad(text, f"unknown fields {sorted(fields)}")
        if not isinstance(task.env_id, str) or not isinstance(task.seed, int) or not isinstance(task.kwargs, dict):
            raise _bad(text, "env_id is text, seed an integer, kwargs an object")
        return task


def task_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """What an agent gets of a data row: the JSON of its task, or its prompt and :data:`ROW` where it has none.

    Raises:
        TaskFormatError: the task is not a JSON object.
    """
    text = row.get(COLUMN)
    if text is None:
        plain = {name: row[name] for name in ROW if name in row}
        return json.loads(json.dumps({"prompt": row.get("raw_prompt"), **plain}, default=str))
    try:
        task = json.loads(text)
    except (TypeError, ValueError) as error:
        raise _no_object(text, f" ({error})") from error
    if not isinstance(task, dict):
        raise _no_object(text)
    return task


def _no_object(text: Any, reason: str = "") -> TaskFormatError:
    return TaskFormatError(
        f"column {COLUMN!r}: expected a JSON object, got {str(text)[:200]!r}{reason}. Write it with json.dumps"
    )


def _bad(text: Any, reason: str) -> TaskFormatError:
    return TaskFormatError(
        f'column {COLUMN!r} must hold JSON like {{"env_id": "turnkey/MiniGrid-v0", "seed": 1, "kwargs": {{}}}}, '
        f"got {str(text)[:200]!r} ({reason}). `turnkey tasks` writes such files."
    )


def split_seeds(n_train: int, n_val: int, seed: int) -> tuple[list[int], list[int]]:
    """``n_train`` and ``n_val`` environment seeds without repeats, the same for the same ``seed``.

    None of them is one of :func:`held_out_seeds`.
    """
    if n_train < 0 or n_val < 0:
        raise ValueError(f"the numbers of tasks must not be negative, got {n_train} and {n_val}")
    rng = np.random.default_rng(seed)
    seeds: dict[int, None] = {}  # a set that remembers its order
    while len(seeds) < n_train + n_val:
        if (drawn_seed := int(rng.integers(_MAX_SEED))) < _MAX_SEED - HELD_OUT:
            seeds[drawn_seed] = None
    drawn = list(seeds)
    return drawn[:n_train], drawn[n_train:]


def held_out_seeds(n: int) -> list[int]:
    """``n`` distinct environment seeds that :func:`split_seeds` never draws; a larger ``n`` begins with the same ones.

    Raises:
        ValueError: ``n`` is larger than :data:`HELD_OUT`.
    """
    if not 0 <= n <= HELD_OUT:
        raise ValueError(f"expected 0 to {HELD_OUT} held-out seeds, got {n}")
    return [_MAX_SEED - 1 - int(place) for place in np.random.default_rng(0).permutation(HELD_OUT)[:n]]


def write_parquet(
    path: str | PathLike[str],
    tasks: Sequence[Task],
    data_source: str,
    split: str,
    *,
    prompts: Sequence[Any] | None = None,
    answers: Sequence[Any] | None = None,
    hints: Sequence[str | None] | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write ``tasks`` as a parquet file in verl's format, one row per task; its folder is made if it is not there.

    The task travels as a JSON string: parquet cannot hold an empty dict and gives every row the union of all keys.
    verl's data loader requires ``prompt``; the agent loop writes its own.

    Args:
        data_source: name in verl's validation metrics.
        split: ``extra_info.split`` of the rows.
        prompts: text or messages of each task, or None; by default the environment's id.
        answers: right answers of each task, a text, a number, a list of these or None: ``reward_model.ground_truth``.
            Where one is a list, all are.
        hints: text of each task's hint, or None: the column ``turnkey_hint``; without any no such column.
        metadata: of the file.

    Raises:
        TaskFormatError: there are no tasks.
    """
    if not tasks:
        raise TaskFormatError(f"no tasks to write to {path}: verl needs at least a batch of them")
    try:
        import pandas as pd
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            'writing tasks needs pandas and pyarrow, which come with verl: pip install "verl-turnkey[verl]"'
        ) from error

    truths = _of_one_kind(answers or [None] * len(tasks))
    rows = [
        {
            "data_source": data_source,
            "prompt": _messages(prompt or task.env_id),
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": index, "split": split},
            COLUMN: task.to_json(),
            **({HINT: hint} if hints and any(hints) else {}),
        }
        for index, (task, prompt, truth, hint) in enumerate(
            zip(tasks, prompts or [None] * len(tasks), truths, hints or [None] * len(tasks), strict=True)
        )
    ]
    table = pa.Table.from_pandas(pd.DataFrame(rows), preserve_index=False)
    with whole_file(path) as part:
        pq.write_table(table.replace_schema_metadata({**(table.schema.metadata or {}), **(metadata or {})}), part)


def open_parquet(path: str | PathLike[str]) -> Any:
    """A ``pyarrow.parquet.ParquetFile``.

    Raises:
        ValueError: it was cut while it was written, or is another file; names it.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path)
    except pa.ArrowInvalid as error:
        raise ValueError(
            f"{path} is not a whole parquet file ({error}). Delete it and write it again: `turnkey train` writes tasks "
            "that are missing, `turnkey tasks` others"
        ) from None


def _messages(prompt: Any) -> list[dict[str, str]]:
    return [{"role": "user", "content": str(prompt)}] if not isinstance(prompt, list) else prompt


def _of_one_kind(answers: Sequence[Any]) -> list[Any]:
    """Texts, or lists of texts where one task has several answers: parquet has one type for a column."""
    if any(isinstance(answer, list) for answer in answers):
        return [[str(text) for text in answer] if isinstance(answer, list) else _texts(answer) for answer in answers]
    return ["" if answer is None else str(answer) for answer in answers]


def _texts(answer: Any) -> list[str]:
    return [] if answer is None else [str(answer)]
