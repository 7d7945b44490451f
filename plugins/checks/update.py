"""Checks of the actor's update: the policy loss, its mean, weights and inputs, and the order of updates."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

from verl_turnkey.advantage import EstimatorSpec
from verl_turnkey.envs.catalog import ADAPTERS
from verl_turnkey.losses import LossSpec, losses
from verl_turnkey.losses.registry import TEACHER, scales_gradient, weighs
from verl_turnkey.plugins.checks.files import task_environments
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import ACTOR, ESTIMATOR, LOG_PROBS, LOSS, OURS, CheckedRun
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.presets import Preset, shipped
from verl_turnkey.plugins.config.recipe_files import beside_parameters
from verl_turnkey.plugins.config.schema import TurnkeyConfig
from verl_turnkey.plugins.credit.trainer_columns import BYPASS
from verl_turnkey.plugins.verl_api import ledger

# verl's losses with one importance ratio per row, and its estimators whose advantages differ within a turn.
RATIO_PER_ROW = ("gspo", "geo_mean")
ADVANTAGE_PER_TOKEN = ("gae",)
# Inputs of policy losses that the trainer itself provides (loss_inputs.PROVIDERS, which imports torch and verl).
PROVIDED = ("staleness", "rewards", "group_reward", "group_log_ratio")
# verl's keys that a turnkey loss ignores: their defaults, and our parameter.
IGNORED_ACTOR_KEYS = {
    "clip_ratio": (0.2, "clip_low"),
    "clip_ratio_low": (0.2, "clip_low"),
    "clip_ratio_high": (0.2, "clip_high"),
    "clip_ratio_c": (3.0, "dual_clip"),
}
WEIGHTS, BY_TURN = "algorithm.rollout_correction.rollout_is", "turnkey.update.order=reverse_turns"


def check_update(run: CheckedRun) -> None:
    """Refuse updates that cannot work, warn of combinations that are hardly intended."""
    _check_loss(run)
    run.needs_name("unknown-loss-aggregation", str(run.actor.loss_agg_mode), ("token-mean", *OTHER_MODES))
    _warn_departures(run)
    if run.our_trainer:
        check_migrated(run)
    _check_order(run)
    check_weights(run)
    check_importance(run)
    check_observations(run)
    _warn_levels(run)
    if run.actor.loss_agg_mode == "seq-mean-token-sum-norm" and run.actor.get("loss_scale_factor") is None:
        warn("norm-by-width", max_response_length=run.config.data.max_response_length)
    for key in (f"{ACTOR}.shuffle", *(["critic.shuffle"] if run.use_critic else [])):
        if run.our_trainer and run.get(key):
            warn("shuffled-mini-batches", key=key)


def warn_ignored(
    node: Any, name: str, keys: dict[str, tuple[Any, str]], spec: EstimatorSpec | LossSpec, our_node: str
) -> None:
    """Warn of verl's keys in the ``node`` of that ``name`` that were changed although ``spec`` does not read them."""
    names = {field.name for field in fields(spec.params)}
    for key, (default, ours) in keys.items():
        if node.get(key, default) != default:
            instead = f", which reads {our_node}.{ours}" if ours in names else ", which has no such parameter"
            warn("algorithm-key-without-effect", name=name, key=key, value=node[key], loss=spec.name, instead=instead)


def _warn_departures(run: CheckedRun) -> None:
    """Warn of values that differ from the method's recipe, and of outputs of the method that no loss reads."""
    estimator = run.estimator
    if estimator is None:
        return
    for key, value in beside_parameters(estimator.name).items():
        if (current := run.get(key)) != value:
            warn("not-as-published", key=key, value=current, estimator=estimator.name, published=value)
    loss_inputs = () if run.loss is None else run.loss.inputs
    readers = [name for name, spec in losses().items() if {*spec.inputs} & {*estimator.gives}]
    if readers and not {*loss_inputs} & {*estimator.gives}:
        switches = " or ".join(f"+turnkey/loss={name}" for name in readers)
        warn("departures-unread", estimator=estimator.name, gives=", ".join(estimator.gives), readers=switches)


def _check_loss(run: CheckedRun) -> None:
    spec, name, estimator = run.loss, run.loss_name, run.estimator
    if spec is None:
        if run.turnkey.loss:
            refuse("loss-parameters", name=name, parameters=sorted(run.turnkey.loss))
        beta = run.actor.policy_loss.get("dro_beta")
        if name == "dro" and not (beta and beta > 0):
            refuse("dro-beta", beta=beta)
        return
    if not run.our_trainer:
        refuse("loss-trainer", name=name, mode=run.mode)
    provided = {*PROVIDED, *TEACHER, *(estimator.gives if estimator else ())}
    if lacking := {key: provider for key, provider in spec.needs.items() if key not in provided}:
        missing = "; ".join(f"{key!r}: {provider}" for key, provider in lacking.items())
        refuse("loss-input", name=name, method=run.value_text(ESTIMATOR), missing=missing)
    if {*spec.needs} - {"staleness", *TEACHER} and estimator is None and run.verls_loops:
        refuse("loss-steps", name=name, method=run.value_text(ESTIMATOR), loop=run.verls_loops[0])
    if "staleness" in spec.needs and not (run.get(BYPASS) and run.rollout.calculate_log_probs):
        refuse("loss-own-log-probs", name=name)
    params = run.loss_params
    _check_mean(run, spec, params)
    if scales_gradient(params) and run.actor.strategy not in FSDP:
        refuse("loss-strategy", name=name, strategy=run.actor.strategy)
    warn_ignored(run.actor, ACTOR, IGNORED_ACTOR_KEYS, spec, "turnkey.loss")
    if "verl.trainer.ppo.core_algos" in sys.modules:
        ledger.verify(("loss",), (name,))


def _check_mean(run: CheckedRun, spec: LossSpec, params: Any) -> None:
    """Check over what a loss is averaged: ``loss_agg_mode`` and importance weights."""
    mean = str(run.actor.loss_agg_mode)
    if spec.per_row and mean != "seq-mean-token-mean":
        refuse("loss-row-mean", loss=spec.name, mean=mean)
    if spec.per_row and (correction := run.get(WEIGHTS)):
        refuse("loss-token-weights", loss=spec.name, correction=correction)
    if weighs(spec, params) and mean != "token-mean":
        refuse("loss-own-weights", loss=spec.name, params=params, mean=mean)


def _check_order(run: CheckedRun) -> None:
    loss, update = run.loss, run.turnkey.update
    compares = loss is not None and loss.compares_groups
    if compares or update.order == "reverse_turns":
        optim = run.actor.optim
        warm_up = max(optim.get("lr_warmup_steps_ratio") or 0, optim.get("lr_warmup_steps") or 0)
        if optim.get("lr_scheduler_type", "constant") != "constant" or warm_up > 0:
            warn("learning-rate-schedule", cause="a policy loss that compares groups" if compares else BY_TURN)
    if update.order == "batch":
        return
    if not run.our_trainer:
        refuse("order-trainer", mode=run.mode)
    if run.verls_loops:
        refuse("order-agent-loop", loop=run.verls_loops[0])
    if run.our_loops and run.turnkey.rollout.rows_hold_turns:
        refuse("order-merged-rows")
    by_turn = update.old_policy == "turn"
    if by_turn and run.get(BYPASS):
        refuse("order-bypass")
    if loss is not None and weighs(loss, run.loss_params):
        refuse("order-loss-weights", loss=loss.name, loss_params=run.loss_params)
    if by_turn and loss is not None and TEACHER.keys() & {*loss.needs}:
        refuse("order-teacher", loss=loss.name)
    if loss is not None and compares:
        refuse("order-twice", loss=loss.name)
    weights = next((key for key in (WEIGHTS, "turnkey.update.importance") if run.get(key)), None)
    if by_turn and weights:
        warn("order-stale-weights", weights=weights)


def _warn_levels(run: CheckedRun) -> None:
    """Warn of pairs of importance ratio and advantage that hardly fit together; they are chosen separately."""
    name, method = run.loss_name, str(run.config.algorithm.adv_estimator)
    several = sorted({*run.verls_loops, *(run.our_loops if run.turnkey.rollout.rows_hold_turns else ())})
    if name in RATIO_PER_ROW and several and run.estimator is not None:
        warn("ratio-of-merged-rows", name=name, loop=several[0], method=method)
    if getattr(run.loss_params, "gradient", None) == "turn" and method in ADVANTAGE_PER_TOKEN:
        warn("ratio-of-token-advantages", method=method, name=name)


WEIGHT = "turnkey.update.weight_by"
# How verl's other modes weight tokens; the weights replace token-mean, the default.
OTHER_MODES = {
    "token-sum": "is a sum that grows with the number of tokens",
    "seq-mean-token-sum": "weights rows by their tokens and divides by the number of rows",
    "seq-mean-token-sum-norm": "weights rows by their tokens and divides by their number and a factor",
    "seq-mean-token-mean": "weights all rows equally",
}
# verl's losses that end in agg_loss, where the weights are applied.
TAKE_WEIGHTS = ("vanilla", "bypass_mode", "cispo", "clip_cov", "dppo_kl", "dppo_tv")
TAKE_WEIGHTS += ("dro", "gpg", "gspo", "kl_cov", "sapo")


def check_weights(run: CheckedRun) -> None:
    """Refuse settings that conflict with weights by step, episode or task."""
    weight_by = run.turnkey.update.weight_by
    if weight_by == "token":
        return
    run.needs_our_trainer("weights-trainer", weight_by=weight_by)
    if reason := _without_weights(run):
        refuse("weights-unusable", weight_by=weight_by, reason=reason)
    for part in (ACTOR, *(["critic"] if run.use_critic else [])):
        if (mean := run.get(f"{part}.loss_agg_mode")) in OTHER_MODES:
            refuse("weights-aggregation", weight_by=weight_by, part=part, mean=mean, effect=OTHER_MODES[mean])


def _without_weights(run: CheckedRun) -> str | None:
    """Why the update cannot take weights, and what to change."""
    loss, params, name = run.loss, run.loss_params, run.loss_name
    if run.turnkey.update.order == "reverse_turns":
        return f"{BY_TURN} averages each turn number by itself; set turnkey.update.order=batch"
    if run.get("distillation.enabled"):
        return "the loss of a distillation takes no weights; set distillation.enabled=false"
    if loss is None:
        return _verls_without_weights(run)
    if loss.per_row or loss.compares_groups:
        return f"the loss {name} is one number per row, a mean over rows; choose another {LOSS}"
    if not weighs(loss, params):
        return None
    instead = "choose one of the two"
    if getattr(params, "aggregate", None) == "turns":
        instead = f"turnkey.loss.aggregate=tokens with {WEIGHT}=step is the same mean over turns"
    return f"the loss {name} weighs its tokens itself (turnkey.loss: {params}); {instead}"


def _verls_without_weights(run: CheckedRun) -> str | None:
    name = run.loss_name
    if name == "geo_mean":
        return f"{LOSS}={name} takes a mean over the rows of each micro-batch itself; choose another loss"
    if name not in TAKE_WEIGHTS:
        register = "register your loss with verl_turnkey.losses.register_loss"
        return f"whether {LOSS}={name} takes weights is unknown: {register}, or choose one of {', '.join(TAKE_WEIGHTS)}"
    for node in ("algorithm", f"{ACTOR}.policy_loss") if name == "bypass_mode" else ():
        rejects = f"{node}.rollout_correction.rollout_rs"
        if run.get(rejects) is not None:
            return f"{LOSS}={name} rejects tokens of each micro-batch ({run.setting(rejects)}); set {rejects}=null"
    return None


def check_importance(run: CheckedRun) -> None:
    """Refuse importance weights that cannot be computed, or that another setting would replace or distort."""
    importance = run.turnkey.update.importance
    if importance is None:
        return
    run.needs_our_trainer("importance-trainer", importance=importance)
    run.needs_off("importance-bypass", BYPASS, importance=importance)
    if not run.get(BYPASS) and run.get(WEIGHTS) is not None:
        refuse("importance-twice", importance=importance, setting=run.setting(WEIGHTS))
    run.needs_on("importance-log-probs", LOG_PROBS, importance=importance)
    if run.loss_name == "geo_mean" or (run.loss is not None and run.loss.per_row):
        refuse("importance-row-loss", loss_name=run.loss_name, importance=importance)


def check_observations(run: CheckedRun) -> None:
    """Refuse the term where no row has an observation between two turns, or an update is not a mean over the batch."""
    rollout, update = run.turnkey.rollout, run.turnkey.update
    if not update.observation_coefficient:
        return
    text = run.value_text("turnkey.update.observation_coefficient")
    run.needs_our_trainer("observations-trainer", observation_coefficient=text)
    if others := sorted({*run.loops} - {OURS}):
        refuse("observations-loop", observation_coefficient=text, others=", ".join(others))
    if not rollout.rows_hold_turns:
        prompt, layout = rollout.prompt, rollout.layout
        refuse("observations-rows", observation_coefficient=text, prompt=prompt, layout=layout)
    if update.order != "batch" or (run.loss is not None and run.loss.compares_groups):
        parts = f"turnkey.update.order={update.order}" if update.order != "batch" else f"the loss {run.loss_name}"
        refuse("observations-phases", observation_coefficient=text, parts=parts)


SIZE, NUMBER = "actor_rollout_ref.actor.ppo_mini_batch_size", "turnkey.update.mini_batches"


def check_migrated(run: CheckedRun) -> None:
    """Warn of a mini-batch larger than the batch in tasks, but smaller in rows: it was probably meant in rows."""
    config, options, update = run.config, run.turnkey.rollout, run.turnkey.update
    tasks, n, size = (int(number) for number in (config.data.train_batch_size, run.rollout.n, run.get(SIZE)))
    # As the presets convert: an episode takes two thirds of its maximum number of turns.
    turns = 2 * options.max_turns // 3 if OURS in run.loops and not options.rows_hold_turns else 1
    number = tasks * n * turns // size
    if size <= tasks or number <= 1 or update.mini_batches is not None or update.order != "batch":
        return
    # The first published settings of the run's method in one of its environments.
    method, ids = str(config.algorithm.adv_estimator).removeprefix("turnkey/"), {*task_environments(config)}
    recipes = {adapter.recipe for adapter in ADAPTERS if adapter.id in (ids or {run.turnkey.env.id})}
    preset = next((preset for preset in shipped() if preset.method == method and preset.env in recipes), None)
    published = _settings(preset, run.turnkey) if preset else ""
    count = f"{tasks * n} episodes" + (f" x about {turns} turns" if turns > 1 else "")
    warn("migrated-mini-batch", size=size, tasks=tasks, count=count, number=number, published=published)


def _settings(preset: Preset, turnkey: TurnkeyConfig) -> str:
    """The preset's value of the same key, and its rewards if the run has different ones."""
    values = {setting.key: setting.value for setting in preset.settings}
    parts = [f"{NUMBER}={values[NUMBER]}"] if NUMBER in values else []
    if (rewards := values.get("turnkey.rewards", turnkey.rewards)) != turnkey.rewards:
        components = [f"{{{', '.join(f'{key}: {value}' for key, value in entry.items())}}}" for entry in rewards]
        parts.append(f"'turnkey.rewards=[{', '.join(components)}]'")
    return f"; +turnkey/preset={preset.name} sets {' and '.join(parts)}" if parts else ""
