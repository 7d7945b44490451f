"""Panels: published sets of tasks with everything that their results depend on, except for the model.

A panel is a JSON file. The same tasks can start differently on another machine (another version of a package, another
file order), so each task has a digest of its start: what the model is shown first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from verl_turnkey.envs.errors import TaskFormatError
from verl_turnkey.envs.registry import make, spec_of
from verl_turnkey.envs.tasks import Task, held_out_seeds, open_parquet, write_parquet

METADATA = "turnkey_panel"
"""key of a parquet file's metadata that holds its panel"""
PLACES = ("url", "urls", "data", "factory", "path", "corpus", "timeout")
"""arguments of environments that say where something is on this machine; no panel contains them"""
TASKS = 48
"""of a small panel"""
FORMAT = 1


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
        if hashes != right or content["format"] != FORMAT:
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
            own = own_ids(env)
        if own is not None:
            here = _seeds(own)
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
    number: int | None = TASKS,
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
        own = own_ids(env)
    if own is None:
        seeds = {f"seed-{seed}": seed for seed in held_out_seeds(TASKS if number is None else number)}
    else:
        ids = _seeds(own)
        chosen = sorted(sorted(ids, key=_sha256)[:number], key=ids.__getitem__)
        seeds = {id: ids[id] for id in chosen}
    at_start = starts(env_id, kwargs, list(seeds.values())) if with_starts else [None] * len(seeds)
    spec = spec_of(env_id, {key: kwargs[key] for key in sorted(kwargs) if key not in PLACES})
    if spec["package"] is None or spec["package"] == "verl_turnkey":
        spec |= {"package": "verl-turnkey", "version": env_id.rpartition("-")[2]}
    content = {
        "panel": name,
        "format": FORMAT,
        "environment": spec,
        "split": split or ("held-out seeds" if own is None else "all"),
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
    """A digest of each seed's start: task, observation, possible actions, key of the state. 16 hexadecimal digits."""
    return list(_starts(env_id, kwargs, seeds))


def _starts(env_id: str, kwargs: Mapping[str, Any], seeds: Sequence[int]) -> Iterator[str]:
    with closing(make(env_id, kwargs)) as env:
        for seed in seeds:
            observation, info = env.reset(seed=seed)
            yield digest([info.get("task"), observation, info.get("admissible"), info.get("state_key")])[:16]


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
