"""A run's folder as a command argument: configuration, rollout settings, checkpoints, where a line continues it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.cli.packages import turnkey
from verl_turnkey.plugins.config.checkpoint_files import TRACKER, resumed_step
from verl_turnkey.plugins.config.leaves import files_of, leaf_of
from verl_turnkey.plugins.config.machine import joins_cluster
from verl_turnkey.plugins.config.overrides import literal, read, values
from verl_turnkey.plugins.config.roles import Use
from verl_turnkey.plugins.log.writer import behind
from verl_turnkey.plugins.view.runs import HOME, Start, configuration, flat, rebased, starts

if TYPE_CHECKING:
    from omegaconf import DictConfig


CARRIED = (Use.PLAYED, Use.SAMPLED, Use.HOSTED)
"""uses of the fields that an evaluation takes from the run"""
METRICS = "VERL_FILE_LOGGER_ROOT="


def metrics_of_start(folder: Path) -> Path:
    """A folder below ``folder`` for the metrics of a start, behind those there: verl overwrites its metrics file."""
    return folder / behind((path.name for path in folder.glob("*-*")), "%Y%m%d-%H%M%S", datetime.now())


MISSING = object()
VERLS_CONFIG = ("verl", "trainer", "config")
"""where verl's configuration lies, in the environment of any machine"""


@dataclass(frozen=True)
class RunFolder:
    """A run and its folder; ``config``: dotted key -> value as Hydra wrote it, with the paths of where it is now."""

    folder: Path
    config: Mapping[str, Any]

    @classmethod
    def of(cls, path: Path) -> RunFolder | None:
        """The run in the folder ``path``, or the run that saved the checkpoint ``path``; None: neither."""
        folder = path.expanduser().absolute()
        if not folder.is_dir():
            return None
        if "turnkey.env.id" in (config := configuration(folder)):
            return cls(folder, config)
        for parent in list(folder.parents)[:3]:
            if any(parent.glob(".hydra")) or any(parent.glob("*/.hydra")):
                with suppress(ValueError):  # the folder of several runs, or of none
                    run = cls(parent, configuration(parent))
                    if "turnkey.env.id" in run.config and run.saved(folder):
                        return run
        return None

    @property
    def checkpoints(self) -> Path:
        """The folder that the run saves its checkpoints to."""
        home = Path(str(self.config[HOME])).expanduser()
        inside = self.folder / home.name  # the run was moved, or its path was relative
        return inside if inside.is_dir() else home.absolute()

    @property
    def env_id(self) -> str:
        """Of the environment; empty where an agent of the user's own played."""
        return "" if self.agent else str(self.config["turnkey.env.id"])

    @property
    def agent(self) -> str | list[str] | None:
        """``turnkey.agent.run``."""
        return self.config.get("turnkey.agent.run")

    @property
    def modules(self) -> list[str]:
        return list(self.config.get("turnkey.modules") or [])

    def saved(self, checkpoint: Path) -> bool:
        """Whether ``checkpoint`` lies in the run's folder of checkpoints."""
        return checkpoint.resolve().is_relative_to(self.checkpoints.resolve())

    def task_files(self, split: str) -> list[str]:
        """The patterns of ``data.<split>_files``."""
        files = self.config.get(f"data.{split}_files") or []
        paths = [str(file) for file in ([files] if isinstance(files, str) else files)]
        return [path if "://" in path else str(self.last.cwd / Path(path).expanduser()) for path in paths]

    @cached_property
    def last(self) -> Start:
        """The last start."""
        return starts(self.folder)[-1]

    def launch(self) -> tuple[Path, list[str]]:
        """The working directory of the last start, and its arguments of ``verl.trainer.main_ppo``."""
        if not (record := self.last.hydra):
            raise ValueError(f"{self.folder} holds no .hydra/hydra.yaml, Hydra's record of how the run was started")
        places = record["runtime"]["config_sources"]
        sources = {source["provider"]: rebased(source["path"], self.last.moved) for source in places}
        options = []
        if Path(sources["main"]).parts[-3:] != VERLS_CONFIG:
            options += ["--config-path", sources["main"]]
        if record["job"]["config_name"] != "ppo_trainer":
            options += ["--config-name", record["job"]["config_name"]]
        if "command-line" in sources:
            options += ["--config-dir", sources["command-line"]]
        words = [self._moved(word) for word in (*record["overrides"]["task"], *record["overrides"]["hydra"])]

        def renamed(match: re.Match[str]) -> str:
            return str(Path(match[1]) / metrics_of_start(self.last.cwd / match[1]).name)

        words = [re.sub(r"([^=]+)/\d{8}-\d{6}$", renamed, word) if METRICS in word else word for word in words]
        return self.last.cwd, [*options, *words]

    def _moved(self, word: str) -> str:
        """An override with the paths of where the run is now."""
        here = rebased(word, self.last.moved)
        if here == word or "${" in word:
            return here
        return f"{word.partition('=')[0]}={literal(rebased(read(word)[1], self.last.moved))}"

    def playing(self, base: DictConfig, held_out: Iterable[str] = ()) -> list[str]:
        """Overrides that give ``base`` the run's rollout settings.

        ``held_out``: arguments of the environment that select a split, which an evaluation does not take from training.
        """
        kept = {f"turnkey.env.kwargs.{name}" for name in held_out}
        there = dict(flat(OmegaConf.to_container(base, resolve=False)))
        return [
            f"++{key}={_written(value)}"
            for key, value in self.config.items()
            if _is_playing(key) and key not in kept and there.get(key, MISSING) != value and value != {}
        ]

    def differing(self, words: Sequence[str]) -> list[str]:
        """``key=value (the run: value)`` for each override in ``words`` that changes a rollout setting of the run."""
        lines = []
        for word in words:
            if "=" in word and not word.startswith("~"):
                key, value = read(word)
                if _is_playing(key) and key in self.config and self.config[key] != value:
                    lines.append(f"{key}={literal(value)} (the run: {literal(self.config[key])})")
        return lines


def _is_playing(key: str) -> bool:
    leaf = leaf_of(key)
    return leaf is not None and leaf.use in CARRIED


def _written(value: Any) -> str:
    """``value`` as an override's text; an interpolation stays one."""
    return f"'{value}'" if isinstance(value, str) and "${" in value and "'" not in value else literal(value)


TRAINER = {
    "default_local_dir": "checkpoints",
    "resume_mode": "auto",
    "resume_from_path": None,
    "total_training_steps": None,
    "val_only": False,
}
"""keys of verl's trainer and their defaults"""


def announce(words: Sequence[str], name: str, *, started: bool, series: bool = False) -> bool:
    """Print where the launch line ``words`` continues the run in the folder ``name``; returns whether to start it.

    ``started``: the run was started before; ``series``: other runs follow, also where this one has ended.
    """
    chosen = {key: values(words, f"trainer.{key}") for key in TRAINER}
    trainer = OmegaConf.create({key: [default, *chosen[key]][-1] for key, default in TRAINER.items()})
    try:
        done, steps = resumed_step(trainer), trainer.total_training_steps
        folder = Path(trainer.default_local_dir)
    except InterpolationResolutionError:
        return True  # refers to other keys: the run's header says where it continues
    if trainer.val_only:
        return True
    if not done:
        if started and trainer.resume_mode == "disable":
            print(f"{name} starts over from step 0, since trainer.resume_mode=disable", flush=True)
        elif started and not any(folder.glob("global_step_*")) and not _elsewhere(words):
            print(f"{name} has no checkpoint yet: it starts over from step 0", flush=True)
        return True
    changed = _changed_since(folder / TRACKER, words)
    since = f"{' and '.join(changed)} changed after the last checkpoint" if changed else ""
    new = f"{turnkey()} train --out FOLDER starts a new run"
    if steps is None or done < steps:
        print(f"continues {name} after step {done}{f' of {steps}' if steps else ''}; {new}", flush=True)
        if since:
            print(f"warning: {since}: the remaining steps use the new files", flush=True)
        return True
    ended = (
        f"{name} has ended: its last checkpoint is from step {done}, and the launch line ends after step {steps}. "
        f"{turnkey()} resume {name} --steps {done + steps} trains further; {new}"
    )
    if since and not series:
        raise ConfigError(f"{since}, but {ended}")
    if since:
        print(f"warning: {since} of {name}", flush=True)
    print(f"nothing was trained: {ended}", flush=True)
    return False


def _elsewhere(words: Sequence[str]) -> bool:
    """Whether other machines may hold the checkpoints."""
    address = values(words, "ray_kwargs.ray_init.address")[-1:]
    return joins_cluster(OmegaConf.create({"ray_kwargs": {"ray_init": {"address": address[0] if address else None}}}))


def _changed_since(checkpoint: Path, words: Sequence[str]) -> list[str]:
    """The files in the fields of the line that name any, and in their folders, that are newer than ``checkpoint``."""
    saved = checkpoint.stat().st_mtime if checkpoint.is_file() else float("inf")
    chosen = dict(read(word) for word in words if "=" in word and leaf_of(word.lstrip("+~").partition("=")[0]))
    sources = [source for key, value in chosen.items() for source in files_of(key, value, Path()).values()]
    files = [source for source in sources if isinstance(source, Path)]
    return list(dict.fromkeys(file.name for file in files if file.stat().st_mtime > saved))
