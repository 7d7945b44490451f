"""The folder of the trajectory log in the driver: whose log it holds, and what a run that begins anew does to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.config.checkpoint_files import TRACKER
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.log.masking import masked
from verl_turnkey.plugins.log.segments import read_segments

NAMES = ("project_name", "experiment_name")
CHECKPOINTS = "default_local_dir"


def check_log_folder(config: DictConfig, turnkey: TurnkeyConfig) -> None:
    """Refuse a folder with another run's log, whose steps and texts would be replaced. The checkpoint is chosen by now.

    A run that begins anew with the same names and the same folder of checkpoints is a second attempt, and is warned: it
    may have stopped before its first checkpoint. One that resumes may have moved.

    Raises:
        ConfigError: names both runs and the ways out.
    """
    folder = turnkey.log.trajectories
    if not folder or not (starts := [_trainer(said) for said in read_segments(Path(folder)).values()]):
        return
    trainer, earlier = config.trainer, starts[-1]
    resumes = _resumes(config)
    compared = NAMES if resumes else (*NAMES, CHECKPOINTS)
    own = {key: masked(trainer.get(key)) for key in compared}
    if other := {key: earlier[key] for key in compared if key in earlier and earlier[key] != own[key]}:
        said = ", ".join(f"trainer.{key}={value}, here {own[key]}" for key, value in other.items())
        refuse(
            "log-of-another-run",
            f"turnkey.log.trajectories={folder} holds the log of another run ({said}), whose steps this one would "
            "replace: choose another folder, or delete this one",
        )
    if not resumes:
        warn(
            "log-of-earlier-start",
            f"turnkey.log.trajectories={folder} holds the log of an earlier start of this run, which begins anew "
            f"(trainer.resume_mode={trainer.resume_mode}): its steps will replace the earlier ones. To keep these "
            "choose another folder",
        )


def _trainer(said: dict[str, Any]) -> dict[str, Any]:
    """The node ``trainer`` of an earlier start's configuration; empty where it is not known."""
    config = said.get("config")
    trainer = config.get("trainer") if isinstance(config, dict) else None
    return trainer if isinstance(trainer, dict) else {}


def _resumes(config: DictConfig) -> bool:
    mode = config.trainer.resume_mode
    return mode == "resume_path" or (mode == "auto" and (Path(config.trainer[CHECKPOINTS]) / TRACKER).is_file())
