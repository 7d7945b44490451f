"""Checks of the actor's update: the policy loss, its mean and inputs, the order of updates."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import Any

from verl_turnkey.advantage import EstimatorSpec
from verl_turnkey.losses import LossSpec, losses
from verl_turnkey.losses.registry import scales_gradient, weighs
from verl_turnkey.losses.tensors import TEACHER
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.migrated import check_migrated
from verl_turnkey.plugins.checks.run import ACTOR, LOG_PROBS, LOSS, MODE, Run, needs_name
from verl_turnkey.plugins.checks.weighing import OTHER_MODES, check_importance, check_observations, check_weights
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.recipe_files import beside_parameters
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
MEAN, WEIGHTS = f"{ACTOR}.loss_agg_mode", "algorithm.rollout_correction.rollout_is"
BY_TURN, OLD_POLICY = "turnkey.update.order=reverse_turns", "turnkey.update.old_policy"


def check_update(run: Run) -> None:
    """Refuse updates that cannot work, warn of combinations that are hardly intended."""
    _check_loss(run)
    needs_name("unknown-loss-aggregation", MEAN, str(run.actor.loss_agg_mode), ("token-mean", *OTHER_MODES))
    _warn_departures(run)
    if run.our_trainer:
        check_migrated(run)
    _check_order(run)
    check_weights(run)
    check_importance(run)
    check_observations(run)
    _warn_levels(run)
    if run.actor.loss_agg_mode == "seq-mean-token-sum-norm" and run.actor.get("loss_scale_factor") is None:
        warn(
            "norm-by-width",
            f"{MEAN}=seq-mean-token-sum-norm divides by the longest response of each micro-batch, so that the same "
            "token counts more next to short rows: for one constant, as in Dr. GRPO, set "
            f"{ACTOR}.loss_scale_factor={run.config.data.max_response_length} (data.max_response_length)",
        )
    for key in (f"{ACTOR}.shuffle", *(["critic.shuffle"] if run.use_critic else [])):
        if run.our_trainer and run.get(key):
            problem = f"{key}=true shuffles the rows of each rank: mini-batches then do not hold whole episodes"
            warn("shuffled-mini-batches", f"{problem}, and the metrics dealing/* do not describe them")


def warn_ignored(
    node: Any, name: str, keys: dict[str, tuple[Any, str]], spec: EstimatorSpec | LossSpec, our_node: str
) -> None:
    """Warn of verl's keys in the ``node`` of that ``name`` that were changed although ``spec`` does not read them."""
    known = {field.name for field in fields(spec.params)}
    for key, (default, own) in keys.items():
        if node.get(key, default) != default:
            instead = f", which reads {our_node}.{own}" if own in known else ", which has no such parameter"
            warn("algorithm-key-without-effect", f"{name}.{key}={node[key]} has no effect on {spec.name}{instead}")


def _warn_departures(run: Run) -> None:
    """Warn of values that differ from the method's recipe, and of outputs of the method that no loss reads."""
    estimator = run.estimator
    if estimator is None:
        return
    for key, value in beside_parameters(estimator.name).items():
        if (own := run.get(key)) != value:
            recipe = f"the recipe of {estimator.name}, which has {value}"
            warn("not-as-published", f"{key}={own} differs from {recipe}: this run is not the method as published")
    loss_inputs = () if run.loss is None else run.loss.inputs
    readers = [name for name, spec in losses().items() if {*spec.inputs} & {*estimator.gives}]
    if readers and not {*loss_inputs} & {*estimator.gives}:
        problem = (
            f"algorithm.adv_estimator={estimator.name} gives {', '.join(estimator.gives)}, which no loss reads here"
        )
        warn("departures-unread", f"{problem}: add {' or '.join(f'+turnkey/loss={name}' for name in readers)}")


def _check_loss(run: Run) -> None:
    spec, name, estimator = run.loss, run.loss_name, run.estimator
    method = run.setting("algorithm.adv_estimator")
    if spec is None:
        if run.turnkey.loss:
            problem = f"turnkey.loss takes no parameters for loss_mode={name!r}, got {sorted(run.turnkey.loss)}"
            refuse("loss-parameters", f"{problem}; they belong to verl's own keys under {ACTOR}")
        beta = run.actor.policy_loss.get("dro_beta")
        if name == "dro" and not (beta and beta > 0):
            refuse("dro-beta", f"the loss dro needs a positive {ACTOR}.policy_loss.dro_beta, got {beta}")
        return
    if not run.our_trainer:
        refuse(
            "loss-trainer",
            f"{LOSS}={name} needs a trainer of this package: add +turnkey=<method> in front of +turnkey/loss={name} "
            f"(+turnkey=base for an estimator of verl's), or set {MODE}=turnkey_{run.mode}, got {run.mode}",
        )
    provided = {*PROVIDED, *TEACHER, *(estimator.gives if estimator else ())}
    if lacking := {key: provider for key, provider in spec.needs.items() if key not in provided}:
        missing = "; ".join(f"{key!r}: {provider}" for key, provider in lacking.items())
        refuse("loss-input", f"{LOSS}={name} needs more than {method} gives ({missing})")
    if {*spec.needs} - {"staleness", *TEACHER} and estimator is None and run.verls_loops:
        problem = f"{LOSS}={name} needs steps, which {method} on rows of {run.verls_loops[0]} does not provide"
        refuse("loss-steps", f"{problem}: take an estimator of this package, or the agent loop turnkey_env")
    if "staleness" in spec.needs and not (run.get(BYPASS) and run.rollout.calculate_log_probs):
        problem = f"{LOSS}={name} takes the rollout's own log-probabilities as the old ones"
        refuse("loss-own-log-probs", f"{problem}: set {BYPASS}=true and {LOG_PROBS}=true, as +turnkey/loss=a3po does")
    params = run.loss_params
    _check_mean(run, spec, params)
    if scales_gradient(params) and run.actor.strategy not in FSDP:
        problem = f"{LOSS}={name} scales gradients, which only FSDP supports"
        refuse("loss-strategy", f"{problem}: set {ACTOR}.strategy=fsdp2, got {run.actor.strategy}")
    warn_ignored(run.actor, ACTOR, IGNORED_ACTOR_KEYS, spec, "turnkey.loss")
    if "verl.trainer.ppo.core_algos" in sys.modules:
        ledger.verify(("loss",), (name,))


def _check_mean(run: Run, spec: LossSpec, params: Any) -> None:
    """Check over what a loss is averaged: ``loss_agg_mode`` and importance weights."""
    mean = str(run.actor.loss_agg_mode)
    if spec.per_row and mean != "seq-mean-token-mean":
        refuse("loss-row-mean", f"the loss {spec.name} is a mean over rows: set {MEAN}=seq-mean-token-mean, got {mean}")
    if spec.per_row and (correction := run.get(WEIGHTS)):
        problem = f"the loss {spec.name} is one number per row, which importance weights would multiply per token"
        refuse("loss-token-weights", f"{problem}: set {WEIGHTS}=null, got {correction}")
    if weighs(spec, params) and mean != "token-mean":
        problem = f"the loss {spec.name} weighs its tokens itself (turnkey.loss: {params})"
        refuse("loss-own-weights", f"{problem}: set {MEAN}=token-mean, got {mean}")


def _check_order(run: Run) -> None:
    loss, update = run.loss, run.turnkey.update
    compares = loss is not None and loss.compares_groups
    if compares or update.order == "reverse_turns":
        _warn_schedule(run, "a policy loss that compares groups" if compares else BY_TURN)
    if update.order == "batch":
        return
    if not run.our_trainer:
        refuse("order-trainer", f"{BY_TURN} needs {MODE}=turnkey_{run.mode}, got {run.mode}")
    if run.verls_loops:
        problem = f"{BY_TURN} needs a row per turn, and {run.verls_loops[0]} gives one per episode (default_agent_loop"
        refuse(
            "order-agent-loop", f"{problem}, or agent_name of the data): use turnkey_env, or turnkey.update.order=batch"
        )
    if run.our_loops and run.turnkey.rollout.rows_hold_turns:
        problem = f"{BY_TURN} needs a row per turn, and turnkey.rollout.layout=merged of conversations holds several"
        refuse("order-merged-rows", f"{problem}: set turnkey.rollout.layout=steps, or turnkey.update.order=batch")
    again = f"{BY_TURN} computes the old log-probabilities again before each turn"
    by_turn = update.old_policy == "turn"
    if by_turn and run.get(BYPASS):
        refuse(
            "order-bypass",
            f"{again}, but {BYPASS}=true keeps the rollout's: set it to false, or {OLD_POLICY}=iteration",
        )
    if loss is not None and weighs(loss, run.loss_params):
        problem = (
            f"{BY_TURN} updates each turn number by itself, and the loss {loss.name} is a mean over the whole batch"
        )
        refuse("order-loss-weights", f"{problem} with weights of its own (turnkey.loss: {run.loss_params}): choose one")
    if by_turn and loss is not None and TEACHER.keys() & {*loss.needs}:
        problem = f"{again}, and the loss {loss.name} compares them with a teacher's of the beginning of the step"
        refuse("order-teacher", f"{problem}: set {OLD_POLICY}=iteration")
    if loss is not None and compares:
        refuse(
            "order-twice", f"{BY_TURN} and the loss {loss.name} each have an order of updates of their own: choose one"
        )
    weights = next((key for key in (WEIGHTS, "turnkey.update.importance") if run.get(key)), None)
    if by_turn and weights:
        problem = f"{again}, while the weights of {weights} stay those of the beginning of the step"
        warn("order-stale-weights", f"{problem}: {OLD_POLICY}=iteration keeps the two together")


def _warn_schedule(run: Run, cause: str) -> None:
    optim = run.actor.optim
    warm_up = max(optim.get("lr_warmup_steps_ratio") or 0, optim.get("lr_warmup_steps") or 0)
    if optim.get("lr_scheduler_type", "constant") != "constant" or warm_up > 0:
        warn(
            "learning-rate-schedule",
            f"{cause} makes several updates of a training step, and verl's learning-rate schedule moves with each: set "
            f"{ACTOR}.optim.lr_scheduler_type=constant without warm-up",
        )


def _warn_levels(run: Run) -> None:
    """Warn of pairs of importance ratio and advantage that hardly fit together; they are chosen separately."""
    name, method = run.loss_name, str(run.config.algorithm.adv_estimator)
    several = sorted({*run.verls_loops, *(run.our_loops if run.turnkey.rollout.rows_hold_turns else ())})
    if name in RATIO_PER_ROW and several and run.estimator is not None:
        warn(
            "ratio-of-merged-rows",
            f"{LOSS}={name} has one importance ratio per row, and a row of {several[0]} holds several turns with "
            f"advantages of their own from {method}: one turn's tokens then decide whether another's are clipped. "
            "+turnkey/loss=turn_ratio has one ratio per turn",
        )
    if getattr(run.loss_params, "gradient", None) == "turn" and method in ADVANTAGE_PER_TOKEN:
        warn(
            "ratio-of-token-advantages",
            f"algorithm.adv_estimator={method} gives each token an advantage of its own, and {name} has one importance "
            "ratio per turn: each token moves by the turn's mean advantage; turnkey.loss.gradient=token lets each move "
            "by its own",
        )
