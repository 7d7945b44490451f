"""Keys of verl that mean something else in launch lines of verl-agent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.envs.catalog import ADAPTERS
from verl_turnkey.plugins.checks.files import task_environments
from verl_turnkey.plugins.checks.findings import warn
from verl_turnkey.plugins.checks.run import OURS, Run
from verl_turnkey.plugins.config.presets import Preset, shipped
from verl_turnkey.plugins.config.schema import TurnkeyConfig

SIZE, NUMBER = "actor_rollout_ref.actor.ppo_mini_batch_size", "turnkey.update.mini_batches"


def check_migrated(run: Run) -> None:
    """Warn of a mini-batch larger than the batch in tasks, but smaller in rows: it was probably meant in rows."""
    config, options, update = run.config, run.turnkey.rollout, run.turnkey.update
    tasks, n, size = (int(number) for number in (config.data.train_batch_size, run.rollout.n, run.get(SIZE)))
    # As the presets convert: an episode takes two thirds of its maximum number of turns.
    turns = 2 * options.max_turns // 3 if OURS in run.loops and not options.rows_hold_turns else 1
    number = tasks * n * turns // size
    if size <= tasks or number <= 1 or update.mini_batches is not None or update.order != "batch":
        return
    preset = _published(config, run.turnkey)
    published = _settings(preset, run.turnkey) if preset else ""
    warn("migrated-mini-batch", size=size, tasks=tasks, n=n, rows=tasks * n * turns, number=number, published=published)


def _published(config: DictConfig, turnkey: TurnkeyConfig) -> Preset | None:
    """The first published settings of the run's method in one of its environments."""
    method, ids = str(config.algorithm.adv_estimator).removeprefix("turnkey/"), {*task_environments(config)}
    recipes = {adapter.recipe for adapter in ADAPTERS if adapter.id in (ids or {turnkey.env.id})}
    return next((preset for preset in shipped() if preset.method == method and preset.env in recipes), None)


def _settings(preset: Preset, turnkey: TurnkeyConfig) -> str:
    """The preset's value of the same key, and its rewards if the run has different ones."""
    values = {setting.key: setting.value for setting in preset.settings}
    parts = [f"{NUMBER}={values[NUMBER]}"] if NUMBER in values else []
    if (rewards := values.get("turnkey.rewards", turnkey.rewards)) != turnkey.rewards:
        parts.append(f"'turnkey.rewards=[{', '.join(map(_component, rewards))}]'")
    return f"; +turnkey/preset={preset.name} sets {' and '.join(parts)}" if parts else ""


def _component(entry: Mapping[str, Any]) -> str:
    return f"{{{', '.join(f'{key}: {value}' for key, value in entry.items())}}}"
