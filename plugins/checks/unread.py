"""Keys of verl that its V1 trainers ignore or read elsewhere: a warning, or a refusal where that does harm."""

from __future__ import annotations

from importlib.util import find_spec

from omegaconf import DictConfig

from verl_turnkey.plugins.checks.files import last_step, steps_until_data_end
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import ACTOR, MODEL, ROLLOUT, Run
from verl_turnkey.plugins.config.checkpoint_files import resumed_step

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


def check_unread(run: Run) -> None:
    """Warn of keys without effect; refuse those whose neglect loses checkpoints or trains something else."""
    for key, (default, instead) in NOWHERE.items():
        if run.get(key) not in (default, None):
            warn("key-without-effect", setting=run.setting(key), instead=instead)
    _check_elsewhere(run)
    _check_trace(run)
    saves, strategy = run.config.trainer.save_freq > 0, str(run.actor.strategy)
    if saves and strategy != "megatron" and (folder := run.config.trainer.get("default_hdfs_dir")):
        refuse("hdfs-dir", folder=folder, strategy=strategy)
    if run.get("skip.rollout_tq.enable") and run.our_loops:
        refuse("rollout-skip", loop=run.our_loops[0])


def _check_elsewhere(run: Run) -> None:
    """Warn of keys whose value verl reads elsewhere."""
    for role, engine in ((ACTOR, "fsdp_config"), *([("critic", "fsdp")] if run.use_critic else [])):
        clip, theirs = run.get(role).get("grad_clip", 1.0), run.get(f"{role}.optim.clip_grad")
        if clip not in (1.0, theirs):
            warn("grad-clip-without-effect", role=role, clip=clip, theirs=theirs)
        strategy, theirs = run.get(f"{role}.{engine}.strategy"), run.get(f"{role}.strategy")
        if strategy not in (None, "fsdp", theirs):
            warn("engine-strategy-without-effect", role=role, engine=engine, strategy=strategy, theirs=theirs)
    if run.use_critic:
        key = "ulysses_sequence_parallel_size"
        spread, theirs = run.config.critic.get(key, 1), run.get(f"critic.fsdp.{key}")
        if spread not in (1, theirs) and theirs is not None:
            warn("critic-spread-without-effect", spread=spread, theirs=theirs)
    ratio, low, high = (run.actor.get(f"clip_ratio{side}") for side in ("", "_low", "_high"))
    if run.loss_name in CLIPPING and ratio not in (None, 0.2, low, high) and None not in (low, high):
        warn("clip-ratio-without-effect", ratio=ratio, low=low, high=high)


def _check_trace(run: Run) -> None:
    """verl's V1 trainers trace nothing, but each agent-loop worker imports the package."""
    if backend := run.get(f"{ROLLOUT}.trace.backend"):
        if backend in TRACERS and find_spec(backend) is None:
            refuse("trace-package-missing", backend=backend)
        warn("trace-without-effect", backend=backend)


def check_steps(config: DictConfig) -> None:
    """Warn if no step is left to train, or if the epochs end before the steps do.

    verl makes the last save and validation only after the last step.
    """
    trainer, reachable = config.trainer, steps_until_data_end(config)
    if trainer.get("val_only"):
        return
    done, last = resumed_step(trainer), last_step(config)
    if done and last is not None and done >= last:
        warn("no-steps-left", done=done, last=last)
    total, epochs = trainer.get("total_training_steps"), trainer.total_epochs
    if total is None or reachable is None or total <= reachable:
        return
    every = {"checkpoint": trainer.save_freq, "validation": trainer.test_freq}
    lost = [name for name, steps in every.items() if steps > 0 and reachable % steps]
    without = f" without a last {' and '.join(lost)}" if lost else ""
    warn(
        "training-steps-not-reached",
        total=total,
        epochs=epochs,
        reachable=reachable,
        without=without,
        enough=-(-total * epochs // max(1, reachable)),
    )
