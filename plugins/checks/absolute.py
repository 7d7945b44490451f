"""Paths of the command line that are relative to the driver's folder: workers have others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.config.schema import TurnkeyConfig


def absolute_paths(config: DictConfig, turnkey: TurnkeyConfig) -> None:
    """Make paths that are relative to the driver's working directory absolute."""
    from verl_turnkey.envs.prompting.prompts import TEMPLATES

    with open_dict(config):
        for i, entry in enumerate(turnkey.rewards):
            for key, path in _of_component(entry).items():
                config.turnkey.rewards[i][key] = path
        strategy = turnkey.rollout.strategy
        asked = strategy.get("reward") if isinstance(strategy, dict) else None  # one component, as probe has it
        if isinstance(asked, dict):
            for key, path in _of_component(asked).items():
                config.turnkey.rollout.strategy.reward[key] = path
        function = OmegaConf.select(config, "reward.custom_reward_function.path")
        if function and Path(function).is_file():
            config.reward.custom_reward_function.path = _absolute(function)
        if turnkey.modules:
            config.turnkey.modules = [_absolute(m) if m.endswith(".py") else m for m in turnkey.modules]
        for key in ("action_format", "summary"):
            if ".py:" in (path := getattr(turnkey.rollout, key) or ""):
                OmegaConf.update(config, f"turnkey.rollout.{key}", _absolute(path))
        shipped = (TEMPLATES / f"{turnkey.rollout.template}.txt").is_file()  # its name wins over a file's
        if not shipped and Path(turnkey.rollout.template).is_file():
            OmegaConf.update(config, "turnkey.rollout.template", _absolute(turnkey.rollout.template))
        if isinstance(turnkey.rollout.examples, str):
            OmegaConf.update(config, "turnkey.rollout.examples", _absolute(turnkey.rollout.examples))
        if turnkey.log.trajectories:
            if "://" in turnkey.log.trajectories:
                refuse(
                    "log-folder-address",
                    f"turnkey.log.trajectories={turnkey.log.trajectories} is an address: expected a folder that every "
                    "node sees, such as one on a mounted file system",
                )
            config.turnkey.log.trajectories = _absolute(turnkey.log.trajectories)


def _of_component(entry: dict[str, Any]) -> dict[str, str]:
    """The paths of a reward component's entry, made absolute."""
    code = {key: str(entry[key]) for key in ("name", "path", "embed", "compare") if key in entry}
    found = {key: path for key, path in code.items() if path.endswith(".py") or ".py:" in path}
    if ":" not in str(entry.get("name")):  # else what its options mean is its own
        found |= {key: entry[key] for key in ("cache", "file") if isinstance(entry.get(key), str)}
    return {key: _absolute(path) for key, path in found.items() if "://" not in path}


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())
