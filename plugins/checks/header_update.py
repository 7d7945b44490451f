"""The header's lines about the update: KL, critic, optimizer steps, means, and settings without effect."""

from __future__ import annotations

from collections.abc import Iterator

from verl_turnkey.losses.registry import weighs
from verl_turnkey.plugins.checks.files import task_environments
from verl_turnkey.plugins.checks.header_run import Lines, plural
from verl_turnkey.plugins.checks.run import AGENT, OURS, Run
from verl_turnkey.plugins.checks.sizes import optimizer_steps, updates_of_a_step
from verl_turnkey.plugins.checks.value_heads import heads_of
from verl_turnkey.plugins.config.schema import RolloutConfig

MEANS = {
    "token-mean": "over tokens",
    "token-sum": "none: the sum over tokens, so that more tokens make a larger gradient",
    "seq-mean-token-sum": "over rows, of sums over tokens",
    "seq-mean-token-sum-norm": "over rows, of sums over tokens divided by {norm}",
    "seq-mean-token-mean": "over rows, of means over tokens",
}
"""verl's ``loss_agg_mode``"""
ROWS_THEMSELVES = ("geo_mean", "sapo")
"""verl's losses that average over rows under any of these modes"""


def _kl(run: Run) -> str:
    algorithm, actor = run.config.algorithm, run.actor
    parts = []
    if algorithm.get("use_kl_in_reward"):
        control = algorithm.kl_ctrl
        kind = f"{algorithm.kl_penalty} in the reward"
        parts.append(f"{control.kl_coef} x {kind} ({control.type})")
    if actor.use_kl_loss:
        parts.append(f"{actor.kl_loss_coef} x {actor.kl_loss_type} in the loss")
    if actor.get("entropy_coeff"):
        parts.append(f"entropy bonus {actor.entropy_coeff}")
    return ", ".join(parts)


def _correction(run: Run) -> str:
    correction = run.config.algorithm.get("rollout_correction") or {}
    keys = ("bypass_mode", "rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
    values = {key: correction.get(key) for key in keys}
    used = [key for key in keys if values[key] and values[key.removesuffix("_threshold")]]
    return ", ".join([*(f"{key}={values[key]}" for key in used), *_importance(run)])


def _importance(run: Run) -> list[str]:
    options = run.turnkey.update
    if options.importance is None:
        return []
    level, high = options.importance, options.importance_high
    kind = "per token" if level == "token" else f"per {level} ({options.importance_ratio})"
    if options.importance_outside == "truncate":
        return [f"importance weight {kind}, at most {high}"]
    result = {"zero_weight": "weighs 0", "clear_mask": "is not trained"}[options.importance_outside]
    return [f"importance weight {kind}; a {level} outside [{options.importance_low or 0}, {high}] {result}"]


def _update(run: Run) -> str:
    return _optimizer_steps(run, "actor") if run.our_trainer and run.trains else ""


def _critic(run: Run) -> str:
    if not run.use_critic or not run.trains:
        return ""
    critic = run.config.critic
    path = f"{run.get('critic.model.path') or 'from the actor'}, lr {critic.optim.lr}"
    if heads := heads_of(run.config, run.turnkey):
        path += f", heads {', '.join(head.name for head in heads)}"
    return f"{path}; {_optimizer_steps(run, 'critic')}" if run.our_trainer else path


def _optimizer_steps(run: Run, role: str) -> str:
    update = optimizer_steps(run.config, run.turnkey, run.sizes, role)
    most = "" if update.exact else "at most "
    turns = role == "actor" and run.turnkey.update.order == "reverse_turns"
    parts = plural(update.mini_batches, "turn" if turns else "mini-batch")
    last = ", from the last turn to the first" if turns else ""
    per = "batch" if updates_of_a_step(run.config) == 1 else "update of a step"
    steps = f"{plural(update.steps, 'optimizer step')} per {per}"
    return f"{most}{parts} x {plural(update.epochs, 'epoch')} = {steps}{last}"


def _mean(run: Run) -> str:
    """Over what the losses of actor and critic are averaged."""
    if not run.our_trainer or not run.trains:
        return ""
    by, actor = run.turnkey.update.weight_by, run.actor
    if by != "token":
        heads = heads_of(run.config, run.turnkey)
        losses = "policy loss, entropy and KL" if heads else "policy loss, entropy, KL and the critic's loss"
        return f"over {by}s of the whole batch, for the {losses} (weight_by={by})"
    mode = str(actor.loss_agg_mode)
    name = run.loss_name
    norm = actor.get("loss_scale_factor") or "the longest response of a micro-batch"
    mean = f"{MEANS[mode].format(norm=norm)} ({mode})"
    if name in ROWS_THEMSELVES:
        return f"{mean}; {name}: over rows"
    if run.loss is not None and weighs(run.loss, run.loss_params):
        return f"{mean}; {name} weights the tokens itself"
    return mean


def ignored(run: Run) -> Iterator[str]:
    """Settings that have no effect in this combination."""
    env = run.turnkey.env
    if OURS in run.loops and env.id and (task_ids := set(task_environments(run.config)) - {env.id}):
        yield f"turnkey.env.id={env.id} where the tasks name another ({', '.join(sorted(task_ids)[:3])})"
    if OURS not in run.loops:
        if env.id:
            yield f"turnkey.env.id={env.id}: {min(run.loops)} plays no environment of this package"
        if run.turnkey.rollout != RolloutConfig() and AGENT not in run.loops:
            yield f"turnkey.rollout.*: only {OURS} reads it"
    if run.our_trainer and run.turnkey.update.mini_batches is not None:
        key = "actor_rollout_ref.actor.ppo_mini_batch_size"
        yield f"{run.setting(key)}: turnkey.update.mini_batches is set"


def _log(run: Run) -> str:
    """Where the trajectory log is."""
    if folder := run.turnkey.log.trajectories:
        return f"each turn in {folder}"
    return "no turns; turnkey.log.trajectories=FOLDER logs each one, for turnkey view"


UPDATE: Lines = (
    ("kl", _kl),
    ("correction", _correction),
    ("critic", _critic),
    ("update", _update),
    ("loss mean", _mean),
    ("log", _log),
)
