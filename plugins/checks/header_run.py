"""The header's first lines: method, loss, trainer, adapter, number of steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.files import last_step, training_loops
from verl_turnkey.plugins.checks.run import OURS
from verl_turnkey.plugins.checks.sizes import Sizes, sizes
from verl_turnkey.plugins.config.checkpoint_files import resumed_step
from verl_turnkey.plugins.config.presets import names, read
from verl_turnkey.plugins.config.schema import (
    TurnkeyConfig,
    credit_modify,
    credit_params,
    estimator_of,
    loss_of,
    loss_params,
    turnkey_config,
)


@dataclass(frozen=True)
class Run:
    """A configuration that has passed the checks, and what several header lines read from it."""

    config: DictConfig
    turnkey: TurnkeyConfig
    loops: list[str]
    """agent loops of the training rows, sorted"""
    sizes: Sizes

    @classmethod
    def of(cls, config: DictConfig) -> Run:
        turnkey, loops = turnkey_config(config), sorted(training_loops(config))
        return cls(config, turnkey, loops, sizes(config, turnkey, loops))

    @property
    def mode(self) -> str:
        return str(self.config.trainer.v1.trainer_mode)

    @property
    def our_trainer(self) -> bool:
        return self.mode.startswith("turnkey_")

    @property
    def our_loop(self) -> bool:
        return OURS in self.loops

    @property
    def has_critic(self) -> bool:
        """As ``verl.trainer.ppo.utils.need_critic`` decides, without its warning."""
        enabled = self.config.critic.enable
        return str(self.config.algorithm.adv_estimator) == "gae" if enabled is None else bool(enabled)

    @property
    def trains(self) -> bool:
        return not self.config.trainer.get("val_only")


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
        value = OmegaConf.select(run.config, setting.key)
        value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        if value != setting.value and not str(setting.value).startswith("${"):
            different.append(f"{setting.key}={value} (published {setting.value})")
    return f"{name}, except {', '.join(different)}" if different else f"{name}, all as published"


def _estimator(run: Run) -> str:
    name = run.config.algorithm.adv_estimator
    is_ours = estimator_of(run.config) is not None
    return f"{name}: {changed(credit_params(run.config, run.turnkey))}" if is_ours else f"{name} (verl's)"


def _modified(run: Run) -> str:
    modifiers = credit_modify(run.config, run.turnkey)
    return "; then ".join(f"{modifier.spec.name}: {changed(modifier.params)}" for modifier in modifiers)


def _loss(run: Run) -> str:
    name = run.config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    if loss_of(run.config) is None:
        kind = OmegaConf.select(run.config, "actor_rollout_ref.actor.policy_loss.rollout_correction.loss_type")
        return f"{name} (verl's)" + (f": loss_type={kind}" if kind and name == "bypass_mode" else "")
    return f"{name}: {changed(loss_params(run.config, run.turnkey))}"


def _trainer(run: Run) -> str:
    return run.mode if run.our_trainer else f"{run.mode} (verl's)"


def _device(run: Run) -> str:
    """What ``+turnkey/device=cpu`` chose for the machine and the model."""
    config = run.config
    if str(config.trainer.device) != "cpu":
        return ""
    threads = OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars.OMP_NUM_THREADS") or 1
    precision = OmegaConf.select(config, "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype")
    generation = config.actor_rollout_ref.rollout.dtype
    return f"cpu: trains in {precision}, generates in {generation}, {plural(threads, 'thread')}"


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
    rank = OmegaConf.select(model, "lora.rank") or 0
    return f"rank {rank}, alpha {OmegaConf.select(model, 'lora.alpha')}" if rank else ""


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
