"""Checks of what verl reports only once models are loaded: reward code, optimizers, packages, sizes, the queue."""

from __future__ import annotations

import importlib
import os
from importlib.util import find_spec
from pathlib import Path

from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.checks.paths import absent, model_config
from verl_turnkey.plugins.checks.run import ACTOR, Run, needs_name
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.schema import closest
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

FUNCTION = "reward.custom_reward_function"
QUEUE = "transfer_queue.backend.SimpleStorage.total_storage_size"
SCHEDULES = ("constant", "cosine")
"""of the learning rate, with FSDP"""


def check_late(run: Run) -> None:
    """Refuse what would end the run after GPUs were reserved."""
    _check_reward_code(run)
    _check_optimizers(run)
    _check_spread(run)
    _check_length(run)
    _check_queue(run)
    sampler = run.config.trainer.v1.sampler
    threshold = sampler.max_off_policy_threshold
    if threshold is not None and not (isinstance(threshold, int) and threshold > 0):
        refuse("off-policy-threshold", threshold=threshold)
    needs_name("unknown-off-policy-strategy", str(sampler.max_off_policy_strategy), ("drop", "wait"))


def _check_reward_code(run: Run) -> None:
    """Check the reward manager and function, which verl loads in workers of their own with any agent loop."""
    from verl.experimental.reward_loop.reward_manager.registry import REWARD_MANAGER
    from verl.trainer.ppo.reward import get_custom_reward_fn

    name, source = str(run.config.reward.reward_manager.name), run.config.reward.reward_manager.source
    if source == "register" and name not in REWARD_MANAGER:
        refuse(
            "unknown-reward-manager",
            name=name,
            closest=closest(name, [*REWARD_MANAGER]),
            choices=", ".join(REWARD_MANAGER),
        )
    path = run.get(f"{FUNCTION}.path")
    if not path or "://" in path or {*run.loops} <= {*AGENT_LOOPS}:  # which does not call it, or as a component
        return
    if not Path(path).expanduser().is_file():
        absent(run.config, f"{FUNCTION}.path={path}: there is no such file")
        return
    try:
        get_custom_reward_fn(run.config)
    except Exception as error:  # the user's own code runs here
        refuse(
            "reward-function-unloadable",
            path=path,
            name=run.get(f"{FUNCTION}.name"),
            kind=type(error).__name__,
            error=error,
        )


def _check_optimizers(run: Run) -> None:
    for role in (ACTOR, "critic") if run.use_critic else (ACTOR,):
        if run.get(f"{role}.strategy") not in FSDP:
            continue
        schedule = f"{role}.optim.lr_scheduler_type"
        needs_name("unknown-schedule", run.get(schedule), SCHEDULES, role=role)
        module, name = run.get(f"{role}.optim.optimizer_impl"), run.get(f"{role}.optim.optimizer")
        if not module:
            continue
        setting = f"{role}.optim.optimizer_impl={module}"
        if find_spec(str(module).partition(".")[0]) is None:
            absent(run.config, f"{setting}: the package is not installed")
        elif not hasattr(importlib.import_module(module), name):
            refuse("unknown-optimizer", role=role, module=module, name=name)
    if run.config.actor_rollout_ref.model.get("use_liger") and find_spec("liger_kernel") is None:
        absent(run.config, "actor_rollout_ref.model.use_liger=true needs the package liger_kernel: pip install it")


def _check_spread(run: Run) -> None:
    """Sequence parallelism must divide the GPUs and the attention heads."""
    heads = model_config(run.config).get("num_attention_heads")
    gpus = run.config.trainer.nnodes * run.config.trainer.n_gpus_per_node
    for part in ("", "fsdp_config.") if run.actor.strategy in FSDP else ():
        key = f"{ACTOR}.{part}ulysses_sequence_parallel_size"
        number = run.get(key)
        if gpus % number:
            refuse("spread-gpus", part=part, number=number, gpus=gpus)
        if heads and heads % number:
            refuse("spread-heads", part=part, number=number, heads=heads)


def _check_length(run: Run) -> None:
    """vLLM does not start with more positions than the model has, unless RoPE scaling is configured."""
    limit, model = run.rollout.max_model_len, model_config(run.config)
    positions = model.get("max_position_embeddings")
    rope = model.get("rope_scaling") or model.get("rope_parameters") or {}
    stretched = rope and rope.get("rope_type", rope.get("type")) != "default"
    own = run.config.actor_rollout_ref.model.get("override_config") or os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN")
    if limit and positions and limit > positions and not stretched and not own:
        refuse("max-model-len", limit=limit, positions=positions)


def _check_queue(run: Run) -> None:
    """Rows that do not fit into the storage fail, and their episodes with them."""
    size = run.get(QUEUE)
    if size is None or run.get("transfer_queue.backend.storage_backend") != "SimpleStorage":
        return
    rows = run.config.data.train_batch_size * run.rollout.n
    rows *= run.turnkey.rollout.max_turns if run.our_loops else 1
    if rows > size:
        refuse("queue-too-small", size=size, rows=rows)
