"""Keys that verl has and its V1 trainers read nowhere, or not where they are set: named, or refused where it hurts."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.files import steps_until_data_end
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"

# Key -> what it is when nobody sets it, and what happens instead.
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
    """Name what was set and does nothing; refuse what would lose checkpoints, or train something else.

    ``loops``: the agent loops of the training rows.

    Raises:
        ConfigError: names the key to change.
    """
    for key, (default, instead) in NOWHERE.items():
        if (value := OmegaConf.select(config, key)) not in (default, None):
            said = str(value).lower() if value is True else value
            warn("key-without-effect", f"{key}={said} has no effect: {instead}")
    _check_elsewhere(config, use_critic=use_critic)
    _check_trace(config)
    saves, strategy = config.trainer.save_freq > 0, str(config.actor_rollout_ref.actor.strategy)
    if saves and strategy != "megatron" and (folder := config.trainer.get("default_hdfs_dir")):
        refuse(
            "hdfs-dir",
            f"trainer.default_hdfs_dir={folder} is read by verl's Megatron engine alone: with strategy={strategy} "
            "checkpoints are in trainer.default_local_dir and nowhere else. Set that to a folder that stays, and "
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
    """What verl reads under another key than the one that was set."""
    actor = config.actor_rollout_ref.actor
    roles = [(ACTOR, actor, "fsdp_config"), *([("critic", config.critic, "fsdp")] if use_critic else [])]
    for role, node, engine in roles:
        if (given := node.get("grad_clip", 1.0)) not in (1.0, read := OmegaConf.select(node, "optim.clip_grad")):
            warn(
                "grad-clip-without-effect",
                f"{role}.grad_clip={given} has no effect: verl's engines read {role}.optim.clip_grad, which is {read}",
            )
        if (given := OmegaConf.select(node, f"{engine}.strategy")) not in (None, "fsdp", node.strategy):
            warn(
                "engine-strategy-without-effect",
                f"{role}.{engine}.strategy={given} has no effect: verl sets it to {role}.strategy, which is "
                f"{node.strategy}",
            )
    if use_critic:
        _check_critics_spread(config)
    ratio, sides = actor.get("clip_ratio", 0.2), [actor.get(f"clip_ratio_{side}") for side in ("low", "high")]
    if actor.policy_loss.get("loss_mode", "vanilla") in CLIPPING and ratio != 0.2 and {ratio, None}.isdisjoint(sides):
        warn(
            "clip-ratio-without-effect",
            f"{ACTOR}.clip_ratio={ratio} has no effect: clip_ratio_low={sides[0]} and clip_ratio_high={sides[1]} take "
            "its place, and verl sets both: set the two",
        )


def _check_critics_spread(config: DictConfig) -> None:
    spread, read = config.critic.get("ulysses_sequence_parallel_size", 1), "critic.fsdp.ulysses_sequence_parallel_size"
    if spread not in (1, found := OmegaConf.select(config, read)) and found is not None:
        warn(
            "critic-spread-without-effect",
            f"critic.ulysses_sequence_parallel_size={spread} has no effect: verl reads {read}, which is {found}",
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
    """Warn of epochs that run out before the steps: verl saves and validates at the end of the steps alone."""
    trainer, most = config.trainer, steps_until_data_end(config)
    asked = trainer.get("total_training_steps")
    if asked is None or most is None or asked <= most or trainer.get("val_only"):
        return
    every = {"checkpoint": trainer.save_freq, "validation": trainer.test_freq}
    lost = [what for what, steps in every.items() if steps > 0 and most % steps]
    without = f" without a last {' and '.join(lost)}" if lost else ""
    epochs = trainer.total_epochs
    warn(
        "training-steps-not-reached",
        f"trainer.total_training_steps={asked} is not reached: trainer.total_epochs={epochs} end after {most} steps"
        f"{without}, and before the learning rate's schedule does. Set "
        f"trainer.total_epochs={-(-asked * epochs // max(1, most))}, or trainer.total_training_steps={most}",
    )
