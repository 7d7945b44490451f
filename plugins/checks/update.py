"""Driver checks of the actor's update: the policy loss, its mean and inputs, the order of updates."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import EstimatorSpec
from verl_turnkey.losses import LossSpec, losses
from verl_turnkey.losses.registry import scales_gradient, weighs
from verl_turnkey.losses.tensors import TEACHER
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.importance import check_importance
from verl_turnkey.plugins.checks.migrated import check_migrated
from verl_turnkey.plugins.checks.observations import check_observations
from verl_turnkey.plugins.checks.weighing import OTHER_MODES, check_weights
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.recipe_files import beside_parameters
from verl_turnkey.plugins.config.schema import TurnkeyConfig, closest, estimator_of, loss_of, loss_params
from verl_turnkey.plugins.credit.unrecorded import VERLS_LOOPS
from verl_turnkey.plugins.verl_api import ledger
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

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


def check_update(
    config: DictConfig, turnkey: TurnkeyConfig, mode: str, loops: Collection[str], *, use_critic: bool
) -> None:
    """Refuse updates that cannot work, warn of combinations that are hardly intended.

    ``mode`` is ``trainer.v1.trainer_mode``, ``loops`` are the agent loops of the training rows.

    Raises:
        ConfigError: names the key to change.
    """
    _check_loss(config, turnkey, mode, loops)
    if (mean := str(config.actor_rollout_ref.actor.loss_agg_mode)) not in (known := ["token-mean", *OTHER_MODES]):
        refuse(
            "unknown-loss-aggregation",
            f"there is no actor_rollout_ref.actor.loss_agg_mode={mean!r}{closest(mean, known)}; choices: "
            f"{', '.join(known)}",
        )
    _warn_departures(config)
    if mode.startswith("turnkey_"):
        check_migrated(config, turnkey, loops)
    _check_order(config, turnkey, mode, loops)
    check_weights(config, turnkey, mode, use_critic=use_critic)
    check_importance(config, turnkey, mode)
    check_observations(config, turnkey, mode, loops)
    _warn_levels(config, turnkey, loops)
    _warn_width(config)
    for key in ("actor_rollout_ref.actor.shuffle", *(["critic.shuffle"] if use_critic else [])):
        if mode.startswith("turnkey_") and OmegaConf.select(config, key):
            warn(
                "shuffled-mini-batches",
                f"{key}=true shuffles the rows of each rank: mini-batches then do not hold whole episodes, and the "
                "metrics dealing/* do not describe them",
            )


def warn_ignored(
    node: DictConfig, where: str, keys: dict[str, tuple[Any, str]], spec: EstimatorSpec | LossSpec, our_node: str
) -> None:
    """Warn of verl's keys under ``where`` that were changed although ``spec`` does not read them."""
    known = {field.name for field in fields(spec.params)}
    for key, (default, own) in keys.items():
        if node.get(key, default) != default:
            instead = f", which reads {our_node}.{own}" if own in known else ", which has no such parameter"
            warn("algorithm-key-without-effect", f"{where}.{key}={node[key]} has no effect on {spec.name}{instead}")


def _warn_departures(config: DictConfig) -> None:
    """Warn of values that differ from the method's recipe, and of outputs of the method that no loss reads."""
    estimator, loss = estimator_of(config), loss_of(config)
    if estimator is None:
        return
    for key, value in beside_parameters(estimator.name).items():
        if (value_set := OmegaConf.select(config, key)) != value:
            warn(
                "not-as-published",
                f"{key}={value_set} differs from the recipe of {estimator.name}, which has {value}: this run is not "
                "the method as published",
            )
    loss_inputs = () if loss is None else loss.inputs
    readers = [name for name, spec in losses().items() if {*spec.inputs} & {*estimator.gives}]
    if readers and not {*loss_inputs} & {*estimator.gives}:
        warn(
            "departures-unread",
            f"algorithm.adv_estimator={estimator.name} gives {', '.join(estimator.gives)}, and no policy loss reads it "
            f"in this run: add {' or '.join(f'+turnkey/loss={name}' for name in readers)}",
        )


def _check_loss(config: DictConfig, turnkey: TurnkeyConfig, mode: str, loops: Collection[str]) -> None:
    spec, name = loss_of(config), config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla")
    if spec is None:
        if turnkey.loss:
            refuse(
                "loss-parameters",
                f"turnkey.loss takes no parameters for loss_mode={name!r}, got {sorted(turnkey.loss)}; they belong to "
                "verl's own keys under actor_rollout_ref.actor",
            )
        beta = config.actor_rollout_ref.actor.policy_loss.get("dro_beta")
        if name == "dro" and not (beta and beta > 0):
            refuse(
                "dro-beta", f"the loss dro needs a positive actor_rollout_ref.actor.policy_loss.dro_beta, got {beta}"
            )
        return
    if not mode.startswith("turnkey_"):
        refuse(
            "loss-trainer",
            f"actor_rollout_ref.actor.policy_loss.loss_mode={name} needs a trainer that hands its parameters to the "
            f"workers, but trainer.v1.trainer_mode is {mode!r}: add +turnkey=<method> in front of +turnkey/loss={name} "
            f"(+turnkey=base for an estimator of verl's), or set trainer.v1.trainer_mode=turnkey_{mode}",
        )
    estimator = estimator_of(config)
    provided = {*PROVIDED, *TEACHER, *(estimator.gives if estimator else ())}
    if lacking := {key: provider for key, provider in spec.needs.items() if key not in provided}:
        missing = "; ".join(f"{key!r}: {provider}" for key, provider in lacking.items())
        refuse(
            "loss-input",
            f"actor_rollout_ref.actor.policy_loss.loss_mode={name} needs more than "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} gives ({missing})",
        )
    if {*spec.needs} - {"staleness", *TEACHER} and estimator is None and (without := {*loops} & {*VERLS_LOOPS}):
        refuse(
            "loss-steps",
            f"actor_rollout_ref.actor.policy_loss.loss_mode={name} needs the steps of each episode, which "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} on the rows of {min(without)} does not provide: "
            "take an estimator of this package, or the agent loop turnkey_env",
        )
    bypass = OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode")
    if "staleness" in spec.needs and not (bypass and config.actor_rollout_ref.rollout.calculate_log_probs):
        refuse(
            "loss-own-log-probs",
            f"actor_rollout_ref.actor.policy_loss.loss_mode={name} takes the rollout's own log-probabilities as the "
            "old ones: set algorithm.rollout_correction.bypass_mode=true and "
            "actor_rollout_ref.rollout.calculate_log_probs=true, as +turnkey/loss=a3po does",
        )
    params = loss_params(config, turnkey)
    _check_mean(config, spec, params)
    strategy = str(config.actor_rollout_ref.actor.strategy)
    if scales_gradient(params) and strategy not in FSDP:
        refuse(
            "loss-strategy",
            f"actor_rollout_ref.actor.policy_loss.loss_mode={name} scales gradients, which it can on "
            f"actor_rollout_ref.actor.strategy=fsdp or fsdp2, got {strategy!r}",
        )
    warn_ignored(config.actor_rollout_ref.actor, "actor_rollout_ref.actor", IGNORED_ACTOR_KEYS, spec, "turnkey.loss")
    if "verl.trainer.ppo.core_algos" in sys.modules:
        ledger.verify(("loss",), (str(name),))


def _check_mean(config: DictConfig, spec: LossSpec, params: Any) -> None:
    """Check over what a loss is averaged: ``loss_agg_mode`` and importance weights."""
    mode = str(config.actor_rollout_ref.actor.loss_agg_mode)
    if spec.per_row and mode != "seq-mean-token-mean":
        refuse(
            "loss-row-mean",
            f"the loss {spec.name} is a mean over rows: set "
            f"actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean, got {mode}",
        )
    if spec.per_row and (correction := OmegaConf.select(config, "algorithm.rollout_correction.rollout_is")):
        refuse(
            "loss-token-weights",
            f"the loss {spec.name} is one number per row, and importance weights would multiply it token by token: set "
            f"algorithm.rollout_correction.rollout_is=null, got {correction}",
        )
    if weighs(spec, params) and mode != "token-mean":
        refuse(
            "loss-own-weights",
            f"the loss {spec.name} weighs its tokens itself (turnkey.loss: {params}): set "
            f"actor_rollout_ref.actor.loss_agg_mode=token-mean, got {mode}",
        )


def _check_order(config: DictConfig, turnkey: TurnkeyConfig, mode: str, loops: Collection[str]) -> None:
    loss = loss_of(config)
    carries = loss is not None and loss.compares_groups
    if carries or turnkey.update.order == "reverse_turns":
        _warn_schedule(
            config, "a policy loss that compares groups" if carries else "turnkey.update.order=reverse_turns"
        )
    if turnkey.update.order == "batch":
        return
    key = "turnkey.update.order=reverse_turns"
    if not mode.startswith("turnkey_"):
        refuse("order-trainer", f"{key} needs trainer.v1.trainer_mode=turnkey_{mode}, got {mode}")
    if verl_loops := {*loops} & {*VERLS_LOOPS}:
        refuse(
            "order-agent-loop",
            f"{key} needs a row per turn, but the agent loop {min(verl_loops)} (default_agent_loop, or the data's "
            "column agent_name) gives one row per episode: use turnkey_env, or turnkey.update.order=batch",
        )
    if {*AGENT_LOOPS} & {*loops} and turnkey.rollout.rows_hold_turns:
        refuse(
            "order-merged-rows",
            f"{key} needs a row per turn, but turnkey.rollout.prompt=conversation with turnkey.rollout.layout=merged "
            "gives rows with several: set turnkey.rollout.layout=steps, or turnkey.update.order=batch",
        )
    if turnkey.update.old_policy == "turn" and OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"):
        refuse(
            "order-bypass",
            f"{key} computes the old log-probabilities again before each turn, but "
            "algorithm.rollout_correction.bypass_mode=true keeps the rollout's: set the one to false, or "
            "turnkey.update.old_policy=iteration",
        )
    params = loss_params(config, turnkey)
    if loss is not None and weighs(loss, params):
        refuse(
            "order-loss-weights",
            f"{key} updates each turn number separately, and the loss {loss.name} (turnkey.loss: {params}) is a "
            "mean over the whole batch with weights of its own: choose one",
        )
    if turnkey.update.old_policy == "turn" and loss is not None and TEACHER.keys() & {*loss.needs}:
        refuse(
            "order-teacher",
            f"{key} computes the old log-probabilities again before each turn, but the teacher's, which the loss "
            f"{loss.name} compares with them, stay those of the beginning of the step: set "
            "turnkey.update.old_policy=iteration",
        )
    if loss is not None and carries:
        refuse("order-twice", f"{key} and the loss {loss.name} each have an order of updates of their own: choose one")
    weights = {
        name: OmegaConf.select(config, name)
        for name in ("algorithm.rollout_correction.rollout_is", "turnkey.update.importance")
    }
    if turnkey.update.old_policy == "turn" and (name := next((name for name, on in weights.items() if on), None)):
        warn(
            "order-stale-weights",
            f"{key} computes the old log-probabilities again before each turn, while the weights of {name} stay those "
            "of the beginning of the step: turnkey.update.old_policy=iteration keeps the two together",
        )


def _warn_schedule(config: DictConfig, cause: str) -> None:
    optim = config.actor_rollout_ref.actor.optim
    warm_up = max(optim.get("lr_warmup_steps_ratio") or 0, optim.get("lr_warmup_steps") or 0)
    if optim.get("lr_scheduler_type", "constant") != "constant" or warm_up > 0:
        warn(
            "learning-rate-schedule",
            f"{cause} makes several updates of a training step, and verl's learning-rate schedule moves with each: "
            "actor_rollout_ref.actor.optim.lr_scheduler_type=constant without warm-up is the intended one",
        )


def _warn_width(config: DictConfig) -> None:
    actor = config.actor_rollout_ref.actor
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.get("loss_scale_factor") is None:
        warn(
            "norm-by-width",
            "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm divides by the longest response of each "
            "micro-batch, so that the same token counts more next to short rows: set actor_rollout_ref.actor."
            f"loss_scale_factor={config.data.max_response_length} (data.max_response_length) for one constant, as "
            "Dr. GRPO has it",
        )


def _warn_levels(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str]) -> None:
    """Warn of pairs of importance ratio and advantage that hardly fit together; they are chosen separately."""
    name = str(config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla"))
    estimator = str(config.algorithm.adv_estimator)
    several = {*loops} & {*VERLS_LOOPS, *(AGENT_LOOPS if turnkey.rollout.rows_hold_turns else ())}
    if name in RATIO_PER_ROW and several and estimator_of(config) is not None:
        warn(
            "ratio-of-merged-rows",
            f"actor_rollout_ref.actor.policy_loss.loss_mode={name} has one importance ratio per row, and a row of "
            f"{min(several)} holds several turns, each with an advantage of its own from {estimator}: one turn's "
            "tokens then decide whether another's are clipped. +turnkey/loss=turn_ratio has one ratio per turn",
        )
    if getattr(loss_params(config, turnkey), "gradient", None) == "turn" and estimator in ADVANTAGE_PER_TOKEN:
        warn(
            "ratio-of-token-advantages",
            f"algorithm.adv_estimator={estimator} gives each token an advantage of its own, and {name} has one "
            "importance ratio per turn: with turnkey.loss.gradient=turn each token moves by the turn's mean advantage; "
            "turnkey.loss.gradient=token lets each token move by its own",
        )
