"""The header's first lines: method, loss, trainer, adapter, number of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from omegaconf import OmegaConf

from verl_turnkey.plugins.checks.files import last_step
from verl_turnkey.plugins.checks.run import ACTOR, MODEL, Run
from verl_turnkey.plugins.config.checkpoint_files import resumed_step
from verl_turnkey.plugins.config.presets import names, read

Lines = tuple[tuple[str, Callable[[Run], str]], ...]
"""label and text; a line without text is left out"""


def plural(number: int | str, noun: str) -> str:
    return f"{number} {noun}" + ("" if str(number) == "1" else "es" if noun.endswith("batch") else "s")


def changed(params: Any) -> str:
    """The parameters that differ from their defaults."""
    different = []
    for entry in fields(params):
        default = entry.default if entry.default_factory is MISSING else entry.default_factory()
        if (value := getattr(params, entry.name)) != default:
            different.append(f"{entry.name}={value} (default {'none' if default is MISSING else default})")
    return ", ".join(different) or "all parameters at their defaults"


def _preset(run: Run) -> str:
    """The published settings that the run starts from, and those that it changes."""
    name = run.turnkey.preset.name
    if not name or name not in names():
        return name or ""  # the user's own file
    different = []
    for setting in read(name).settings:
        value = run.get(setting.key)
        value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        if value != setting.value and not str(setting.value).startswith("${"):
            different.append(f"{setting.key}={value} (published {setting.value})")
    return f"{name}, except {', '.join(different)}" if different else f"{name}, all as published"


def _estimator(run: Run) -> str:
    name = run.config.algorithm.adv_estimator
    return f"{name} (verl's)" if run.estimator is None else f"{name}: {changed(run.params)}"


def _modified(run: Run) -> str:
    return "; then ".join(f"{modifier.spec.name}: {changed(modifier.params)}" for modifier in run.modifiers)


def _loss(run: Run) -> str:
    if run.loss is not None:
        return f"{run.loss_name}: {changed(run.loss_params)}"
    kind = run.get(f"{ACTOR}.policy_loss.rollout_correction.loss_type")
    return f"{run.loss_name} (verl's)" + (f": loss_type={kind}" if kind and run.loss_name == "bypass_mode" else "")


def _trainer(run: Run) -> str:
    return run.mode if run.our_trainer else f"{run.mode} (verl's)"


def _device(run: Run) -> str:
    """What ``+turnkey/device=cpu`` chose for the machine and the model."""
    if str(run.config.trainer.device) != "cpu":
        return ""
    threads = run.get("ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS") or 1
    precision = run.get(f"{ACTOR}.fsdp_config.mixed_precision.param_dtype")
    return f"cpu: trains in {precision}, generates in {run.rollout.dtype}, {plural(threads, 'thread')}"


def _steps(run: Run) -> str:
    """The number of training steps, the one after which the run continues, and those that train only the critic."""
    config = run.config
    if not run.trains:
        return "none: one validation (trainer.val_only=true)"
    number, done = last_step(config), resumed_step(config.trainer)
    by_data = number != config.trainer.get("total_training_steps")
    most = "at most " if config.data.get("filter_overlong_prompts") and by_data else ""
    continues = f"continues after step {done}" if done else ""
    warm_up = config.trainer.get("critic_warmup") or 0
    critic_only = f"only the critic before step {warm_up} (trainer.critic_warmup)" if warm_up > 1 else ""
    return "; ".join(filter(None, (f"{most}{number}" if number else "", continues, critic_only)))


def _lora(run: Run) -> str:
    model = run.config.actor_rollout_ref.model
    if rank := model.get("lora_rank", 0):
        start = f", from {model.lora_adapter_path}" if model.get("lora_adapter_path") else ""
        return f"rank {rank}, alpha {model.lora_alpha}, on {model.target_modules}{start}"
    rank = run.get(f"{MODEL}.lora.rank") or 0
    return f"rank {rank}, alpha {run.get(f'{MODEL}.lora.alpha')}" if rank else ""


RUN: Lines = (
    ("preset", _preset),
    ("estimator", _estimator),
    ("modified by", _modified),
    ("loss", _loss),
    ("trainer", _trainer),
    ("device", _device),
    ("lora", _lora),
    ("steps", _steps),
)
