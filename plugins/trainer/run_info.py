"""Describes the run in the trajectory log: ``run.json``, and a file for each start of the trainer."""

from __future__ import annotations

import platform
import subprocess
import threading
from dataclasses import asdict, is_dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.panel import validation_panel
from verl_turnkey.plugins.config.schema import credit_modify, credit_params, estimator_of, loss_of, turnkey_config
from verl_turnkey.plugins.log.bounds import logged_shares
from verl_turnkey.plugins.log.masking import masked
from verl_turnkey.plugins.log.schema import SCHEMA_VERSION
from verl_turnkey.plugins.log.segments import UNNAMED, private, write_json, write_segment
from verl_turnkey.plugins.notices import logger

SECONDS = 10.0
"""how long training waits for the disk before it starts"""
PACKAGES = ("verl", "verl-turnkey", "vllm", "torch", "ray", "transformers")


def write_start(config: DictConfig, resumed_from: int) -> None:
    """Write ``run.json`` and ``segments/<segment>.json``, if the run has a log; without them if the disk refuses.

    ``resumed_from``: the step of the checkpoint that was loaded, 0 without one.
    """
    log = turnkey_config(config).log
    if log.trajectories is None:
        return
    folder, segment = Path(log.trajectories), log.segment or UNNAMED
    masked_config = masked(OmegaConf.to_container(config, resolve=True))
    facts = {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "resumed_from": resumed_from,
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "commit": _commit(),
        "panel": validation_panel(config),
        **_shares(config),
        "config": masked_config,
    }

    def write() -> None:
        try:
            write_json(private(folder) / "run.json", {**about(config), "config": masked_config})
            write_segment(folder, segment, facts)
        except OSError as error:
            logger.warning(
                "turnkey.log.trajectories lacks the description of the run: %s: %s", type(error).__name__, error
            )

    thread = threading.Thread(target=write, name="start of the trajectory log", daemon=True)
    thread.start()
    thread.join(SECONDS)


def about(config: DictConfig) -> dict[str, Any]:
    """What readers of the tables need: schema, method and parameters."""
    turnkey = turnkey_config(config)
    estimator, loss = estimator_of(config), loss_of(config)
    params = credit_params(config, turnkey)
    return {
        "schema": SCHEMA_VERSION,
        "project": config.trainer.get("project_name"),
        "experiment": config.trainer.get("experiment_name"),
        "method": str(config.algorithm.adv_estimator) if estimator is None else estimator.name,
        "params": asdict(params) if is_dataclass(params) else {},  # pyright: ignore[reportArgumentType]
        "modify": [
            {"name": modifier.spec.name, **asdict(modifier.params)} for modifier in credit_modify(config, turnkey)
        ],
        **_shares(config),
        "panel": validation_panel(config),
        "loss": str(config.actor_rollout_ref.actor.policy_loss.get("loss_mode")) if loss is None else loss.name,
    }


def _shares(config: DictConfig) -> dict[str, float]:
    """The logged shares; of other groups only failed episodes are in the log."""
    shares = logged_shares(config)
    return {"share": shares.training, "validation_share": shares.validation}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the git repository that the run was started in, if it was one."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
