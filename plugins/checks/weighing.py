"""Checks of what ``turnkey.update`` weighs: ``weight_by``, ``importance`` and ``observation_coefficient``."""

from __future__ import annotations

from verl_turnkey.losses.registry import weighs
from verl_turnkey.plugins.checks.findings import refuse
from verl_turnkey.plugins.checks.run import ACTOR, LOG_PROBS, LOSS, OURS, Run, needs_off, needs_on, needs_our_trainer
from verl_turnkey.plugins.config.resolve import CORRECTION
from verl_turnkey.plugins.credit.trainer_columns import BYPASS

WEIGHT, IMPORTANCE = "turnkey.update.weight_by", "turnkey.update.importance"
OBSERVATIONS, BY_TURN = "turnkey.update.observation_coefficient", "turnkey.update.order=reverse_turns"
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


def check_weights(run: Run) -> None:
    """Refuse settings that conflict with weights by step, episode or task."""
    if run.turnkey.update.weight_by == "token":
        return
    setting = run.setting(WEIGHT)
    needs_our_trainer("weights-trainer", run, setting)
    if reason := _without_weights(run):
        refuse("weights-unusable", f"{setting}: {reason}, or set {WEIGHT}=token")
    for part in (ACTOR, *(["critic"] if run.use_critic else [])):
        if (mean := run.get(f"{part}.loss_agg_mode")) in OTHER_MODES:
            problem = f"{setting} conflicts with {part}.loss_agg_mode={mean}, which {OTHER_MODES[mean]}"
            refuse("weights-aggregation", f"{problem}: set {part}.loss_agg_mode=token-mean, or {WEIGHT}=token")


def _without_weights(run: Run) -> str | None:
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


def _verls_without_weights(run: Run) -> str | None:
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


def check_importance(run: Run) -> None:
    """Refuse importance weights that cannot be computed, or that another setting would replace or distort."""
    if run.turnkey.update.importance is None:
        return
    setting, weights = run.setting(IMPORTANCE), f"{CORRECTION}.rollout_is"
    needs_our_trainer("importance-trainer", run, setting)
    same = f"{setting} compares old_log_probs with those of the rollout, and {BYPASS}=true makes them the same"
    needs_off("importance-bypass", run, BYPASS, same)
    if not run.get(BYPASS) and run.get(weights) is not None:
        problem = f"{setting} would replace the weights of {run.setting(weights)}"
        refuse("importance-twice", f"{problem}: set {weights}=null, or {IMPORTANCE}=null")
    needs_on("importance-log-probs", run, LOG_PROBS, f"{setting} compares with the rollout's log-probabilities")
    if run.loss_name == "geo_mean" or (run.loss is not None and run.loss.per_row):
        problem = f"the loss {run.loss_name} is one number per row, while {setting} weights parts of a row"
        refuse("importance-row-loss", f"{problem}: set {IMPORTANCE}=null, or choose another {LOSS}")


def check_observations(run: Run) -> None:
    """Refuse the term where no row has an observation between two turns, or an update is not a mean over the batch."""
    rollout, setting = run.turnkey.rollout, run.setting(OBSERVATIONS)
    if not run.turnkey.update.observation_coefficient:
        return
    needs_our_trainer("observations-trainer", run, setting)
    if others := sorted({*run.loops} - {OURS}):
        problem = f"{setting} needs rows of {OURS}, which marks the tokens of observations, got {', '.join(others)}"
        refuse("observations-loop", f"{problem}: set {OBSERVATIONS}=0")
    if not rollout.rows_hold_turns:
        problem = f"{setting} learns observations between the turns of a row, and this run makes a row per turn"
        merged = "turnkey.rollout.prompt=conversation turnkey.rollout.layout=merged"
        refuse("observations-rows", f"{problem}: set {merged}, got {rollout.prompt} and {rollout.layout}")
    if run.turnkey.update.order != "batch" or (run.loss is not None and run.loss.compares_groups):
        order = run.setting("turnkey.update.order")
        parts = order if run.turnkey.update.order != "batch" else f"the loss {run.loss_name}"
        problem = f"{setting} is a mean over the batch, but {parts} updates on parts of it"
        refuse("observations-phases", f"{problem}: set {OBSERVATIONS}=0")
