"""Describes the run in the trajectory log: ``run.json``, and a file for each start of the trainer."""

from __future__ import annotations

import threading
from dataclasses import asdict, is_dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.data import validation_panel
from verl_turnkey.plugins.checks.files import listed
from verl_turnkey.plugins.config.leaves import every, files_of, value_of
from verl_turnkey.plugins.config.machine import git, hardware, versions
from verl_turnkey.plugins.config.schema import credit_modify, credit_params, estimator_of, loss_of, turnkey_config
from verl_turnkey.plugins.log.bounds import logged_shares
from verl_turnkey.plugins.log.masking import masked
from verl_turnkey.plugins.log.schema import SCHEMA_VERSION
from verl_turnkey.plugins.log.segments import UNNAMED, private, sha256, write_json, write_segment
from verl_turnkey.plugins.notices import logger

SECONDS = 10.0
"""how long training waits for the disk before it starts"""


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
        "versions": versions(),
        "commit": git("rev-parse", "HEAD"),
        "changed": bool(git("status", "--porcelain", "--untracked-files=no")),
        "hardware": {
            **hardware(),
            "nodes": config.trainer.get("nnodes"),
            "per_node": config.trainer.get("n_gpus_per_node"),
        },
        "panel": validation_panel(config),
        **_shares(config),
        "config": masked_config,
    }

    def write() -> None:
        try:
            write_json(private(folder) / "run.json", {**about(config), "config": masked_config})
            write_segment(folder, segment, {**facts, "files": _files(config)})
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


def _files(config: DictConfig) -> dict[str, str]:
    """Path of each file of tasks, and of each that a field of the configuration names -> its sha256."""
    paths = [Path(path) for key in ("train_files", "val_files") for path in listed(config, key)]
    paths += [path for leaf in every().values() for path in files_of(leaf.key, value_of(config, leaf), Path())]
    return {str(path): sha256(path) for path in paths if path.is_file()}
