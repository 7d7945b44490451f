"""What a recipe puts in the place of values from the user's own configuration file.

Hydra composes a group that a launch line adds behind the file, so that the group's values win without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.config.command_line import CommandLine
from verl_turnkey.plugins.config.composing import verls_config_dir
from verl_turnkey.plugins.config.recipe_files import leaves

STOCK = "_generated_ppo_trainer.yaml"
"""verl's own values in one file"""
ESTIMATOR, MODE = "algorithm.adv_estimator", "trainer.v1.trainer_mode"
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"


def replaced(config: DictConfig, arguments: Sequence[str]) -> list[str]:
    """``key=theirs, now ours`` of each value of the user's file that a recipe replaces; none without such a file.

    Raises:
        ConfigError: one of them is the trainer's mode or the agent loop, which nobody means to lose.
    """
    flat = verls_config_dir() / STOCK
    if not (CommandLine(arguments).own_files and HydraConfig.initialized() and flat.is_file()):
        return []
    hydra = HydraConfig.get()
    words = [str(word) for word in hydra.overrides.task]
    theirs_alone = [word for word in words if not word.lstrip("+").startswith("turnkey")]
    try:
        loader = GlobalHydra.instance().config_loader()
        found = loader.load_configuration(str(hydra.job.config_name), theirs_alone, RunMode.RUN)
    except HydraException:  # their file or line needs a group of ours
        return []
    stock = OmegaConf.load(flat)
    said = []
    for key, theirs in leaves(found):
        if key == ESTIMATOR or key.startswith("hydra."):
            continue
        ours = OmegaConf.select(config, key)
        if theirs in (ours, OmegaConf.select(stock, key)):
            continue
        if key == MODE and ours != (kept := f"turnkey_{str(theirs).removeprefix('turnkey_')}"):
            refuse("group-replaces-override", _lost(key, theirs, ours, kept))
        if key == LOOP:
            refuse("group-replaces-choice", _lost(key, theirs, ours, f"{theirs} or {ours}"))
        if key != MODE:
            said.append(f"{key}={theirs} of your file, now {ours}")
    return said


def _lost(key: str, theirs: Any, ours: Any, choice: str) -> str:
    return f"your file has {key}={theirs}, and +turnkey would make it {ours}: write {key}={choice} on the launch line"
