"""Values of the user's own configuration file that a recipe replaces.

Hydra composes a group that the launch line adds after the file, so the group's values win silently.
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
    """A text for each value of the user's file that a recipe replaces; none without such a file."""
    flat = verls_config_dir() / STOCK
    if not (CommandLine(arguments).own_files and HydraConfig.initialized() and flat.is_file()):
        return []
    hydra = HydraConfig.get()
    words = [str(word) for word in hydra.overrides.task]
    user_words = [word for word in words if not word.lstrip("+").startswith("turnkey")]
    try:
        loader = GlobalHydra.instance().config_loader()
        without_groups = loader.load_configuration(str(hydra.job.config_name), user_words, RunMode.RUN)
    except HydraException:  # their file or line needs a group of ours
        return []
    stock = OmegaConf.load(flat)
    replacements = []
    for key, user_value in leaves(without_groups):
        if key == ESTIMATOR or key.startswith("hydra."):
            continue
        value = OmegaConf.select(config, key)
        if user_value in (value, OmegaConf.select(stock, key)):
            continue
        if key == MODE and value != (matching := f"turnkey_{str(user_value).removeprefix('turnkey_')}"):
            refuse("group-replaces-override", message=_lost(key, user_value, value, matching))
        if key == LOOP:
            refuse("group-replaces-choice", message=_lost(key, user_value, value, f"{user_value} or {value}"))
        if key != MODE:
            replacements.append(f"{key}={user_value} of your file, now {value}")
    return replacements


def _lost(key: str, user_value: Any, value: Any, choice: str) -> str:
    return (
        f"your file has {key}={user_value}, and +turnkey would make it {value}: write {key}={choice} on the launch line"
    )
