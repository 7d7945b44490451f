"""A run's folder as a command argument: its configuration, its rollout settings and its checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import strftime
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from verl_turnkey.plugins.config.overrides import literal, read
from verl_turnkey.plugins.view.runs import HOME, configuration, flat

if TYPE_CHECKING:
    from omegaconf import DictConfig

ROLLOUT = "actor_rollout_ref.rollout"
PLAYING = (
    *(f"turnkey.{node}" for node in ("env.kwargs", "agent", "rollout", "rewards", "modules")),
    *(f"data.{key}" for key in ("max_prompt_length", "max_response_length", "apply_chat_template_kwargs")),
    *(f"{ROLLOUT}.{key}" for key in ("temperature", "top_p", "top_k", "dtype", "max_model_len", "engine_kwargs.vllm")),
    f"{ROLLOUT}.multi_turn.format",
    *(f"actor_rollout_ref.model.{key}" for key in ("trust_remote_code", "external_lib", "custom_chat_template")),
)
"""nodes of the configuration that determine how episodes are played"""
NAMED_BY_USERS = ("turnkey.agent.env", "turnkey.agent.files")
"""mappings whose names may hold dots"""
METRICS = "VERL_FILE_LOGGER_ROOT="
MISSING = object()
VERLS_CONFIG = ("verl", "trainer", "config")
"""where verl's configuration lies, in the environment of any machine"""


@dataclass(frozen=True)
class RunFolder:
    """A run and its folder; ``config``: dotted key -> value as Hydra wrote it, interpolations unresolved."""

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
        return [str(file) for file in ([files] if isinstance(files, str) else files)]

    def launch(self) -> tuple[Path, list[str]]:
        """The working directory of the last start, and its arguments of ``verl.trainer.main_ppo``."""
        files = sorted(self.folder.rglob(".hydra/hydra.yaml"), key=lambda path: path.stat().st_mtime_ns)
        if not files:
            raise ValueError(f"{self.folder} holds no .hydra/hydra.yaml, Hydra's record of how the run was started")
        hydra: Any = OmegaConf.to_container(OmegaConf.load(files[-1]), resolve=False)
        record = hydra["hydra"]
        sources = {source["provider"]: source["path"] for source in record["runtime"]["config_sources"]}
        options = []
        if Path(sources["main"]).parts[-3:] != VERLS_CONFIG:
            options += ["--config-path", sources["main"]]
        if record["job"]["config_name"] != "ppo_trainer":
            options += ["--config-name", record["job"]["config_name"]]
        if "command-line" in sources:
            options += ["--config-dir", sources["command-line"]]
        words = [*record["overrides"]["task"], *record["overrides"]["hydra"]]
        stamp = f"/{strftime('%Y%m%d-%H%M%S')}"  # verl overwrites its metrics file: a folder for each start
        words = [re.sub(r"/\d{8}-\d{6}$", stamp, word) if METRICS in word else word for word in words]
        return Path(record["runtime"]["cwd"]), [*options, *words]

    def playing(self, base: DictConfig, held_out: Iterable[str] = ()) -> list[str]:
        """Overrides that give ``base`` the run's rollout settings.

        ``held_out``: arguments of the environment that select a split, which an evaluation does not take from training.
        """
        kept = {f"turnkey.env.kwargs.{name}" for name in held_out}
        there = dict(flat(OmegaConf.to_container(base, resolve=False)))
        own = {
            key: value
            for key, value in self.config.items()
            if _is_playing(key) and key not in kept and there.get(key, MISSING) != value and value != {}
        }
        for node in NAMED_BY_USERS:
            entries = {key: own.pop(key) for key in [*own] if key.startswith(f"{node}.")}
            own |= {node: {key.removeprefix(f"{node}."): value for key, value in entries.items()}} if entries else {}
        return [f"++{key}={_written(value)}" for key, value in own.items()]

    def differing(self, words: Sequence[str]) -> list[str]:
        """``key=value (the run: value)`` for each override in ``words`` that changes a rollout setting of the run."""
        lines = []
        for word in words:
            if "=" in word and not word.startswith("~"):
                key, value = read(word)
                if _is_playing(key) and (own := self.config.get(key, MISSING)) is not MISSING and own != value:
                    lines.append(f"{key}={literal(value)} (the run: {literal(own)})")
        return lines


def _is_playing(key: str) -> bool:
    return any(key == node or key.startswith(f"{node}.") for node in PLAYING)


def _written(value: Any) -> str:
    """``value`` as an override's text; an interpolation stays one."""
    return f"'{value}'" if isinstance(value, str) and "${" in value and "'" not in value else literal(value)
