"""Tasks: which environment, which seed; the files in which verl reads them; and panels.

Panels are published sets of tasks with everything that their results depend on, except for the model. A panel is a JSON
file. The same tasks can start differently on another machine (another version of a package, another file order), so
each task has a digest of its start: what the model is shown first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from verl_turnkey.advantage.text_files import whole_file
from verl_turnkey.envs.answers import images_key
from verl_turnkey.envs.errors import MissingPackageError, TaskFormatError
from verl_turnkey.envs.registry import make, spec_of

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
    "turnkey/BFCL-v0": {"val": {"split": "val"}, "test": {"split": "test"}},
    "turnkey/AppWorld-v0": {
        "val": {"tasks": "data/datasets/dev.txt"},
        "test": {"tasks": "data/datasets/test_normal.txt"},
    },
}
"""of the environments with a finite set of tasks: the arguments for validation, and for an evaluation"""


class PartialRow(dict[str, Any]):
    """A data row of which nothing but the task is known."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        super().__init__({COLUMN: json.dumps(task), **{name: task[name] for name in ROW if name in task}})
        self.lacks: str | None = None
        """a field that was read and is not there"""

    def __missing__(self, name: str) -> Any:
        self.lacks = name
        raise KeyError(name)

    def get(self, key: str, default: Any = None, /) -> Any:
        self.lacks = self.lacks if key in self else key
        return super().get(key, default)


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
    if seed < 0:
        raise ValueError(f"the seed of the tasks must be 0 or more, got {seed}")
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

    without = [None] * len(tasks)
    rows = [
        {
            "data_source": data_source,
            "prompt": prompt
            if prompt and isinstance(prompt, list)
            else [{"role": "user", "content": str(prompt or task.env_id)}],
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"index": index, "split": split},
            COLUMN: task.to_json(),
            **({HINT: hint} if hints and any(hints) else {}),
        }
        for index, (task, prompt, truth, hint) in enumerate(
            zip(tasks, prompts or without, _of_one_kind(answers or without), hints or without, strict=True)
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


def _of_one_kind(answers: Sequence[Any]) -> list[Any]:
    """Texts, or lists of texts where one task has several answers: parquet has one type for a column."""
    if not any(isinstance(answer, list) for answer in answers):
        return ["" if answer is None else str(answer) for answer in answers]
    several = [answer if isinstance(answer, list) else [answer] for answer in answers]
    return [[str(text) for text in texts if text is not None] for texts in several]


METADATA = "turnkey_panel"
"""key of a parquet file's metadata that holds its panel"""
PLACES = ("url", "urls", "data", "factory", "path", "corpus", "timeout")
"""arguments of environments that say where something is on this machine; no panel contains them"""
PANEL_TASKS = 48
"""of a small panel"""
PANEL_FORMAT = 1


@dataclass(frozen=True)
class Panel:
    """A panel; ``content`` is that of its file.

    ``panel``: its name. ``environment``: id, kwargs, package and version. ``split``: what the tasks were chosen from.
    ``settings``: prompt, limits and rewards (:func:`~verl_turnkey.plugins.config.playing.settings`). ``returns``: least
    and greatest return of an episode, null if unknown. ``samples``: per task. ``tasks``: id, seed and start of each.
    """

    content: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.content["panel"])

    @property
    def samples(self) -> int:
        return int(self.content["samples"])

    @property
    def env_id(self) -> str:
        return str(self.content["environment"]["id"])

    @property
    def sha256(self) -> str:
        """Hash of the whole content, 64 hexadecimal digits."""
        return digest(self.content)

    @property
    def mark(self) -> dict[str, str]:
        """What results, logs and checkpoints say of the panel: name and hash."""
        return {"name": self.name, "sha256": self.sha256}

    def text(self) -> str:
        """The content of the file; a task is a line."""
        rest = {name: value for name, value in self.content.items() if name != "tasks"}
        head = json.dumps({**rest, "tasks_sha256": digest(self.content["tasks"]), "sha256": self.sha256}, indent=1)
        tasks = ",\n".join(f"  {json.dumps(task)}" for task in self.content["tasks"])
        return f'{head[:-2]},\n "tasks": [\n{tasks}\n ]\n}}\n'

    @classmethod
    def read(cls, text: str, where: str) -> Panel:
        """Read ``text()`` back; ``where`` names it in the error.

        Raises:
            TaskFormatError: it is not a panel, or its hashes do not match its content.
        """
        try:
            content = json.loads(text)
            hashes = [content.pop("tasks_sha256"), content.pop("sha256")]
            right = [digest(content["tasks"]), digest(content)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TaskFormatError(f"{where} is not a panel ({error!r}); `turnkey panel NAME` writes them") from error
        if hashes != right or content["format"] != PANEL_FORMAT:
            raise TaskFormatError(
                f"{where} was changed: the hash of its content is {right[1]}, not {hashes[1]}. `turnkey panel NAME "
                "ENVIRONMENT` writes a panel of your own"
            )
        return cls(content)

    def tasks(self, places: Mapping[str, Any]) -> list[Task]:
        """The tasks as this machine plays them: a task with an id of the environment's own is found by that id.

        ``places``: arguments that say where the environment is here.

        Raises:
            TaskFormatError: the environment lacks a task here.
        """
        kwargs = dict(self.content["environment"]["kwargs"])
        seeds = {task["id"]: int(task["seed"]) for task in self.content["tasks"]}
        with closing(make(self.env_id, {**kwargs, **places})) as env:
            ids = own_ids(env)
        if ids is not None:
            here = _seeds(ids)
            if missing := [id for id in seeds if id not in here]:
                raise TaskFormatError(
                    f"panel {self.name}: {len(missing)} of its {len(seeds)} tasks are not on this machine, such as "
                    f"{missing[0]!r}: the data are incomplete or another version ({len(here)} tasks here)"
                )
            seeds = {id: here[id] for id in seeds}
        return [Task(self.env_id, seed, kwargs) for seed in seeds.values()]

    def other_starts(self, tasks: Sequence[Task], places: Mapping[str, Any]) -> list[str]:
        """Ids of the tasks that start differently here; tasks without a recorded start are skipped."""
        wanted = {task["id"]: task["start"] for task in self.content["tasks"]}
        if not any(wanted.values()):
            return []
        digests = starts(self.env_id, {**self.content["environment"]["kwargs"], **places}, [t.seed for t in tasks])
        return [id for (id, start), here in zip(wanted.items(), digests, strict=True) if start and start != here]

    def write_parquet(self, path: str | PathLike[str], tasks: Sequence[Task]) -> None:
        """Write the tasks as verl reads them; the file's metadata hold the panel."""
        write_parquet(path, tasks, self.name, "panel", metadata={METADATA: self.text()})


def make_panel(
    name: str,
    env_id: str,
    kwargs: Mapping[str, Any],
    settings: Mapping[str, Any],
    *,
    number: int | None = PANEL_TASKS,
    samples: int = 1,
    split: str | None = None,
    returns: Sequence[float] | None = None,
    with_starts: bool = True,
) -> Panel:
    """Make a panel on this machine.

    Args:
        kwargs: all arguments of the environment; :data:`PLACES` among them are used here and left out.
        number: of tasks; None: all that the environment names. Of a larger set, the tasks whose ids have the least
            SHA-256; an environment that names no tasks gets held-out seeds.
        with_starts: whether to reset the environment for each task and record the start.
    """
    with closing(make(env_id, kwargs)) as env:
        ids = own_ids(env)
    if ids is None:
        seeds = {f"seed-{seed}": seed for seed in held_out_seeds(PANEL_TASKS if number is None else number)}
    else:
        every = _seeds(ids)
        chosen = sorted(sorted(every, key=_sha256)[:number], key=every.__getitem__)
        seeds = {id: every[id] for id in chosen}
    at_start = starts(env_id, kwargs, list(seeds.values())) if with_starts else [None] * len(seeds)
    spec = spec_of(env_id, {key: kwargs[key] for key in sorted(kwargs) if key not in PLACES})
    if spec["package"] is None or spec["package"] == "verl_turnkey":
        spec |= {"package": "verl-turnkey", "version": env_id.rpartition("-")[2]}
    content = {
        "panel": name,
        "format": PANEL_FORMAT,
        "environment": spec,
        "split": split or ("held-out seeds" if ids is None else "all"),
        "settings": settings,
        "returns": None if returns is None else list(returns),
        "samples": samples,
        "tasks": [
            {"id": id, "seed": seed, "start": start} for (id, seed), start in zip(seeds.items(), at_start, strict=True)
        ],
    }
    return Panel(json.loads(json.dumps(content)))


def own_ids(env: Any) -> Sequence[str] | None:
    """The environment's names of its tasks, in the order of their seeds; None: any seed is a task."""
    names = getattr(env.unwrapped, "task_ids", None)
    return None if names is None else names()


def _seeds(ids: Sequence[str]) -> dict[str, int]:
    """The least seed of each id."""
    return {id: seed for seed, id in reversed([*enumerate(ids)])}


def starts(env_id: str, kwargs: Mapping[str, Any], seeds: Sequence[int]) -> list[str]:
    """A digest of each seed's start: task, observation, images, possible actions, key of the state; 16 hex digits."""
    digests = []
    with closing(make(env_id, kwargs)) as env:
        for seed in seeds:
            observation, info = env.reset(seed=seed)
            start = [info.get("task"), observation, info.get("admissible"), info.get("state_key")]
            pictures = images_key(info.get("images") or ())
            digests.append(digest([*start, pictures] if pictures else start)[:16])
    return digests


def digest(content: Any) -> str:
    """SHA-256 of ``content`` as JSON with sorted keys."""
    return _sha256(json.dumps(content, sort_keys=True, ensure_ascii=True))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def panel_of(file: str | PathLike[str]) -> Panel | None:
    """The panel whose tasks a parquet file holds; None: it is another file."""
    path = Path(file).expanduser()
    if path.suffix != ".parquet" or not path.is_file():
        return None
    text = (open_parquet(path).schema_arrow.metadata or {}).get(METADATA.encode())
    return None if text is None else Panel.read(text.decode("utf-8"), str(path))
