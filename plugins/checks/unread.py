"""Keys of verl that its V1 trainers ignore or read elsewhere: a warning, or a refusal where that does harm."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.files import last_step, steps_until_data_end
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.config.checkpoint_files import resumed_step
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"

# Key -> its default, and what verl does instead of reading it.
NOWHERE = {
    "actor_rollout_ref.nccl_timeout": (600, "verl's workers start their process groups with torch's own timeout"),
    f"{ACTOR}.freeze_vision_tower": (False, "verl's engines train all of the model"),
    f"{ACTOR}.use_prefix_grouper": (False, "verl's engines pass it on to no model"),
    f"{MODEL}.tiled_mlp.enabled": (False, "verl's engines pass it on to no model"),
    "skip.rollout.enable": (False, "verl's V1 trainers read skip.rollout_tq"),
    "skip.async_rollout.enable": (False, "verl's V1 trainers read skip.rollout_tq"),
}
# What the agent-loop workers import for ``rollout.trace.backend``.
TRACERS = ("weave", "mlflow", "trackio")
# verl's losses that clip ratios.
CLIPPING = ("vanilla", "dppo_tv", "dppo_kl", "gspo", "clip_cov", "geo_mean", "cispo")


def check_unread(config: DictConfig, loops: Collection[str], *, use_critic: bool) -> None:
    """Warn of keys without effect; refuse those whose neglect loses checkpoints or trains something else.

    ``loops``: the agent loops of the training rows.

    Raises:
        ConfigError: names the key to change.
    """
    for key, (default, instead) in NOWHERE.items():
        if (value := OmegaConf.select(config, key)) not in (default, None):
            value_text = str(value).lower() if value is True else value
            warn("key-without-effect", f"{key}={value_text} has no effect: {instead}")
    _check_elsewhere(config, use_critic=use_critic)
    _check_trace(config)
    saves, strategy = config.trainer.save_freq > 0, str(config.actor_rollout_ref.actor.strategy)
    if saves and strategy != "megatron" and (folder := config.trainer.get("default_hdfs_dir")):
        refuse(
            "hdfs-dir",
            f"trainer.default_hdfs_dir={folder} is read only by verl's Megatron engine: with strategy={strategy} "
            "checkpoints are only in trainer.default_local_dir. Set that to a persistent folder, and "
            "trainer.default_hdfs_dir=null",
        )
    if OmegaConf.select(config, "skip.rollout_tq.enable") and (ours := {*AGENT_LOOPS} & {*loops}):
        refuse(
            "rollout-skip",
            "skip.rollout_tq.enable=true plays stored rows again as if each were an episode, and "
            f"{min(ours)} makes "
            "several of an episode: set it to false",
        )


def _check_elsewhere(config: DictConfig, *, use_critic: bool) -> None:
    """Warn of keys whose value verl reads elsewhere."""
    actor = config.actor_rollout_ref.actor
    roles = [(ACTOR, actor, "fsdp_config"), *([("critic", config.critic, "fsdp")] if use_critic else [])]
    for role, node, engine in roles:
        if (value := node.get("grad_clip", 1.0)) not in (
            1.0,
            engine_value := OmegaConf.select(node, "optim.clip_grad"),
        ):
            warn(
                "grad-clip-without-effect",
                f"{role}.grad_clip={value} has no effect: verl's engines read {role}.optim.clip_grad, which is "
                f"{engine_value}",
            )
        if (value := OmegaConf.select(node, f"{engine}.strategy")) not in (None, "fsdp", node.strategy):
            warn(
                "engine-strategy-without-effect",
                f"{role}.{engine}.strategy={value} has no effect: verl sets it to {role}.strategy, which is "
                f"{node.strategy}",
            )
    if use_critic:
        _check_critics_spread(config)
    ratio, sides = actor.get("clip_ratio", 0.2), [actor.get(f"clip_ratio_{side}") for side in ("low", "high")]
    if actor.policy_loss.get("loss_mode", "vanilla") in CLIPPING and ratio != 0.2 and {ratio, None}.isdisjoint(sides):
        warn(
            "clip-ratio-without-effect",
            f"{ACTOR}.clip_ratio={ratio} has no effect: clip_ratio_low={sides[0]} and clip_ratio_high={sides[1]} take "
            "precedence, and verl's defaults set both: set these two",
        )


def _check_critics_spread(config: DictConfig) -> None:
    spread, key = config.critic.get("ulysses_sequence_parallel_size", 1), "critic.fsdp.ulysses_sequence_parallel_size"
    if spread not in (1, engine_value := OmegaConf.select(config, key)) and engine_value is not None:
        warn(
            "critic-spread-without-effect",
            f"critic.ulysses_sequence_parallel_size={spread} has no effect: verl reads {key}, which is {engine_value}",
        )


def _check_trace(config: DictConfig) -> None:
    """verl's V1 trainers trace nothing, but each agent-loop worker imports the package."""
    if backend := OmegaConf.select(config, f"{ROLLOUT}.trace.backend"):
        key = f"{ROLLOUT}.trace.backend={backend}"
        if backend in TRACERS and find_spec(backend) is None:
            refuse(
                "trace-package-missing", f"{key} needs the package {str(backend)!r}: pip install it, or set it to null"
            )
        warn(
            "trace-without-effect",
            f"{key} has no effect: verl's V1 trainers trace no rollouts; turnkey.log.trajectories writes them",
        )


def check_steps(config: DictConfig) -> None:
    """Warn if no step is left to train, or if the epochs end before the steps do.

    verl makes the last save and validation only after the last step.
    """
    _check_left(config)
    trainer, reachable = config.trainer, steps_until_data_end(config)
    total = trainer.get("total_training_steps")
    if total is None or reachable is None or total <= reachable or trainer.get("val_only"):
        return
    every = {"checkpoint": trainer.save_freq, "validation": trainer.test_freq}
    lost = [name for name, steps in every.items() if steps > 0 and reachable % steps]
    without = f" without a last {' and '.join(lost)}" if lost else ""
    epochs = trainer.total_epochs
    warn(
        "training-steps-not-reached",
        f"trainer.total_training_steps={total} is not reached: trainer.total_epochs={epochs} end after {reachable} "
        f"steps{without}, and before the learning rate's schedule does. Set "
        f"trainer.total_epochs={-(-total * epochs // max(1, reachable))}, or trainer.total_training_steps={reachable}",
    )


def _check_left(config: DictConfig) -> None:
    done, last = resumed_step(config.trainer), last_step(config)
    if done and last is not None and done >= last and not config.trainer.get("val_only"):
        warn(
            "no-steps-left",
            f"the checkpoint that this run continues from is of step {done}, and the run ends after step {last}: no "
            "step is left to train. To train further raise trainer.total_training_steps (and trainer.total_epochs); "
            "for a new run set another trainer.default_local_dir, or trainer.resume_mode=disable",
        )
