"""Checks of what verl reports only once models are loaded: reward code, optimizers, packages, sizes, the queue."""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.checks.lora import FSDP
from verl_turnkey.plugins.checks.paths import absent, model_config
from verl_turnkey.plugins.config.schema import TurnkeyConfig, closest
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FUNCTION, MANAGER = "reward.custom_reward_function", "reward.reward_manager"
STALE = ("drop", "wait")
"""what verl's trainers do with episodes that are too old"""
QUEUE = "transfer_queue.backend.SimpleStorage.total_storage_size"


def check_late(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str], *, use_critic: bool) -> None:
    """Refuse what would end the run after GPUs were reserved; ``loops``: those of the training rows.

    Raises:
        ConfigError: names the key to change.
    """
    _check_reward_code(config, loops)
    _check_optimizers(config, use_critic=use_critic)
    _check_spread(config)
    _check_length(config)
    _check_queue(config, turnkey, loops)
    _check_sampler(config)


def _check_reward_code(config: DictConfig, loops: Collection[str]) -> None:
    """Check the reward manager and function, which verl loads in workers of their own with any agent loop."""
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.ppo.reward import get_custom_reward_fn

    name, source = str(config.reward.reward_manager.name), config.reward.reward_manager.source
    if source == "register" and name not in REWARD_MANAGER:
        refuse(
            "unknown-reward-manager",
            f"there is no {MANAGER}.name={name!r} in verl's V1 trainers{closest(name, [*REWARD_MANAGER])}; choices: "
            f"{', '.join(REWARD_MANAGER)}",
        )
    path = OmegaConf.select(config, f"{FUNCTION}.path")
    if not path or "://" in path or {*loops} <= {*AGENT_LOOPS}:  # which does not call it, or as a component
        return
    if not Path(path).expanduser().is_file():
        absent(config, f"{FUNCTION}.path={path}: there is no such file")
        return
    try:
        get_custom_reward_fn(config)
    except Exception as error:  # the user's own code runs here
        function = OmegaConf.select(config, f"{FUNCTION}.name")
        reason = f"{type(error).__name__}: {error}"
        refuse("reward-function-unloadable", f"{FUNCTION}.path={path}, name={function}: it cannot be loaded ({reason})")


def _check_optimizers(config: DictConfig, *, use_critic: bool) -> None:
    roles = {ACTOR: config.actor_rollout_ref.actor} | ({"critic": config.critic} if use_critic else {})
    for role, node in roles.items():
        module, name = OmegaConf.select(node, "optim.optimizer_impl"), OmegaConf.select(node, "optim.optimizer")
        if node.strategy not in FSDP or not module:
            continue
        key = f"{role}.optim.optimizer_impl={module}"
        if find_spec(str(module).partition(".")[0]) is None:
            absent(config, f"{key}: the package is not installed")
        elif not hasattr(importlib.import_module(module), name):
            refuse("unknown-optimizer", f"{key} has no {role}.optim.optimizer={name}")
    if config.actor_rollout_ref.model.get("use_liger") and find_spec("liger_kernel") is None:
        absent(config, "actor_rollout_ref.model.use_liger=true needs the package liger_kernel: pip install it")


def _check_spread(config: DictConfig) -> None:
    """Sequence parallelism must divide the GPUs and the attention heads."""
    actor, heads = config.actor_rollout_ref.actor, model_config(config).get("num_attention_heads")
    if actor.strategy not in FSDP:
        return
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    for part in ("", "fsdp_config."):
        key = f"{ACTOR}.{part}ulysses_sequence_parallel_size"
        number = OmegaConf.select(config, key)
        if gpus % number:
            refuse("spread-gpus", f"{key}={number} does not divide the {gpus} GPUs of the trainer: choose a divisor")
        if heads and heads % number:
            refuse(
                "spread-heads", f"{key}={number} does not divide the model's {heads} attention heads: choose a divisor"
            )


def _check_length(config: DictConfig) -> None:
    """vLLM does not start with more positions than the model has, unless RoPE scaling is configured."""
    limit, model = config.actor_rollout_ref.rollout.max_model_len, model_config(config)
    positions, rope = (
        model.get("max_position_embeddings"),
        model.get("rope_scaling") or model.get("rope_parameters") or {},
    )
    stretched = rope and rope.get("rope_type", rope.get("type")) != "default"
    own = config.actor_rollout_ref.model.get("override_config") or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN")
    if limit and positions and limit > positions and not stretched and not own:
        refuse(
            "max-model-len",
            f"{ROLLOUT}.max_model_len={limit} exceeds the {positions} positions of the model, so that vLLM would not "
            f"start: lower it to {positions}",
        )


def _check_queue(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str]) -> None:
    """Rows that do not fit into the storage fail, and their episodes with them."""
    size = OmegaConf.select(config, QUEUE)
    if size is None or OmegaConf.select(config, "transfer_queue.backend.storage_backend") != "SimpleStorage":
        return
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    rows *= turnkey.rollout.max_turns if {*AGENT_LOOPS} & {*loops} else 1
    if rows > size:
        refuse(
            "queue-too-small",
            f"{QUEUE}={size} is less than the {rows} rows that a batch may have, and episodes whose rows do not fit "
            f"are lost: set {QUEUE}=null for no limit",
        )


def _check_sampler(config: DictConfig) -> None:
    sampler = config.trainer.v1.sampler
    if (threshold := sampler.max_off_policy_threshold) is not None and not (
        isinstance(threshold, int) and threshold > 0
    ):
        refuse(
            "off-policy-threshold",
            f"trainer.v1.sampler.max_off_policy_threshold={threshold}: expected a positive number of steps, or, from "
            "verl 0.9.1 on, null for any",
        )
    if (strategy := str(sampler.max_off_policy_strategy)) not in STALE:
        refuse(
            "unknown-off-policy-strategy",
            f"there is no trainer.v1.sampler.max_off_policy_strategy={strategy!r}{closest(strategy, [*STALE])}",
        )
