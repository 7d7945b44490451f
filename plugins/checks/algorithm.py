"""Checks of verl's keys under ``algorithm``: estimators, rollout correction, group filtering, KL.

verl reports these after the first rollout, or ignores them.
"""

from __future__ import annotations

from omegaconf import DictConfig

from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import (
    ACTOR,
    ESTIMATOR,
    FILTER,
    LOG_PROBS,
    LOSS,
    Run,
    needs_name,
    needs_on,
)
from verl_turnkey.plugins.config.foreign_keys import WITHOUT_INPUT
from verl_turnkey.plugins.config.resolve import CORRECTION
from verl_turnkey.plugins.config.schema import closest
from verl_turnkey.plugins.credit.trainer_columns import BYPASS
from verl_turnkey.plugins.verl_api import internals
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

# Keys of former versions, which verl's V1 trainers do not read, and those that replace them.
FORMER = {
    "custom_reward_function.path": "reward.custom_reward_function.path",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_loop_source": "reward.reward_manager.source",
    "sandbox_fusion.url": "reward.sandbox_fusion.url",
}
METRIC = "algorithm.filter_groups.metric"
KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
IS_LEVELS = ("token", "sequence")
BYPASS_LOSSES = ("ppo_clip", "reinforce")
METRICS = ("reward", "acc", "env_return", "episode_length", "invalid_rate", "unparsed_rate")
"""metrics that turnkey_env reports per episode, besides ``composed_return.<component>``; ``reward`` is verl's name for
the composed return"""


def check_algorithm(run: Run) -> None:
    """Refuse keys of former versions, weights that the run would not compute, and unknown names."""
    for key, instead in FORMER.items():
        if run.get(key) is not None:
            refuse("v0-key", f"{key}={run.get(key)} is not read by verl's V1 trainers: write {instead}")
    name = str(run.config.algorithm.adv_estimator)
    if name in WITHOUT_INPUT:
        problem = f"{ESTIMATOR}={name} needs {WITHOUT_INPUT[name]}, which verl's V1 trainers do not provide"
        refuse("estimator-input", f"{problem}: choose another one")
    if run.config.algorithm.get("use_pf_ppo") and name == "gae":
        problem = "algorithm.use_pf_ppo=true resamples rows, and verl then writes advantages to the wrong rows"
        refuse("pf-ppo", f"{problem}: set it to false")
    elif run.config.algorithm.get("use_pf_ppo"):
        warn("pf-ppo-without-effect", f"algorithm.use_pf_ppo=true has no effect with {ESTIMATOR}={name}")
    _check_correction(run)
    _check_filter(run)
    _check_kl(run)


def _check_correction(run: Run) -> None:
    correction, loss = run.config.algorithm.get("rollout_correction") or {}, run.loss_name
    if loss == "bypass_mode":
        _check_bypass_loss(run, correction)
    if correction.get("bypass_mode"):
        theirs = f"{BYPASS}=true uses the rollout's log-probabilities as the old ones"
        needs_on("bypass-without-log-probs", run, LOG_PROBS, theirs)
    bypass = correction.get("bypass_mode") and loss != "bypass_mode"
    if bypass and (kind := correction.get("loss_type", BYPASS_LOSSES[0])) != BYPASS_LOSSES[0]:
        problem = f"{CORRECTION}.loss_type={kind} is read only by the loss bypass_mode, but {LOSS}={loss}"
        refuse("loss-type-without-bypass", f"{problem}: set {LOSS}=bypass_mode, or {CORRECTION}.loss_type=ppo_clip")
    for key in (key for key in ("rollout_is", "rollout_rs") if correction.get(key)):
        setting = f"{CORRECTION}.{key}={correction[key]}"
        if bypass:
            because = " (+turnkey/loss=a3po sets it)" if loss == "a3po" else ""
            refuse(
                "correction-with-bypass",
                f"{setting} is not computed with {BYPASS}=true{because}: set {key}=null, or {LOSS}=bypass_mode, which "
                "computes it in the update, or bypass_mode=false with a loss that does not need it",
            )
        theirs = f"{setting} compares with the rollout's log-probabilities"
        needs_on("correction-without-log-probs", run, LOG_PROBS, theirs)
    _check_thresholds(correction)


def _check_bypass_loss(run: Run, correction: DictConfig | dict) -> None:
    """Refuse settings for verl's loss ``bypass_mode`` that differ from those that verl's V1 trainers read."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    theirs = f"{LOSS}=bypass_mode uses the rollout's log-probabilities as the old ones"
    needs_on("bypass-loss-without-bypass", run, BYPASS, theirs)
    node, default = f"{ACTOR}.policy_loss.rollout_correction", RolloutCorrectionConfig()
    if (own := run.get(node)) is None:
        return
    for key, value in ((str(key), value) for key, value in correction.items()):
        is_default = value == getattr(default, key, value)
        if key != "bypass_mode" and not is_default and own.get(key, getattr(default, key)) != value:
            problem = f"{CORRECTION}.{key}={value} is ignored because {node} is set, which has {own.get(key)}"
            refuse("correction-given-twice", f"{problem}: set {node}.{key}={value}, or drop one of the two")


def _check_thresholds(correction: DictConfig | dict) -> None:
    """Check levels and thresholds with verl's own parsers, which it calls only at the first advantages."""
    from verl.trainer.ppo import rollout_corr_helper as helper

    level, rejection = correction.get("rollout_is"), correction.get("rollout_rs")
    if level is not None and level not in IS_LEVELS:
        choices = f"{closest(str(level), [*IS_LEVELS])}; choices: {', '.join(IS_LEVELS)}, null"
        refuse("unknown-rollout-is", f"there is no {CORRECTION}.rollout_is={level!r}{choices}")
    options = [part.strip() for part in str(rejection).split(",")] if rejection is not None else []
    known = sorted(helper.SUPPORTED_ROLLOUT_RS_OPTIONS)
    for option in (option for option in options if option not in known):
        choices = f"{closest(option, known)}; choices: {', '.join(known)}, null"
        refuse("unknown-rollout-rs", f"there is no {CORRECTION}.rollout_rs={option!r}{choices}")
    for key, read in {
        "rollout_is_threshold": lambda value: level and helper._parse_rollout_is_threshold(value),
        "rollout_rs_threshold": lambda value: options and helper._parse_rollout_rs_thresholds(options, value),
    }.items():
        try:
            read(correction.get(key))
        except (TypeError, ValueError) as error:
            refuse("correction-threshold", f"{CORRECTION}.{key}={correction.get(key)}: {error}")


def _check_filter(run: Run) -> None:
    """Refuse a metric that no episode has; not under verl's loops, whose metrics depend on the reward function."""
    if not run.get(FILTER):
        return
    metric = run.get(METRIC)
    known = [name for name in METRICS if name != "reward" or name == internals.reward_metric()]
    if not metric:
        refuse("filter-metric-missing", f"{FILTER}=true compares a metric of the episodes: set {METRIC}={known[0]}")
    elif {*run.loops} <= {*AGENT_LOOPS} and metric not in known and not str(metric).startswith("composed_return."):
        problem = (
            f"there is no {METRIC}={metric!r} with the agent loop {min(run.loops)} and verl {internals.verl_version()}"
        )
        choices = f"{closest(str(metric), known)}; choices: {', '.join(known)}, composed_return.<component>"
        refuse("unknown-filter-metric", f"{problem}{choices}")


def _check_kl(run: Run) -> None:
    """Refuse names and coefficients of KL, which verl reads after the first rollout, or once Ray has started."""
    algorithm = run.config.algorithm
    used = {f"{ACTOR}.kl_loss_type": run.actor.use_kl_loss, "algorithm.kl_penalty": algorithm.use_kl_in_reward}
    for key in (key for key, on in used.items() if on):
        needs_name("unknown-kl-penalty", key, str(run.get(key)).removesuffix("+"), KL_PENALTIES)
    if not algorithm.use_kl_in_reward:
        return
    key, kind = "algorithm.kl_ctrl.type", str(algorithm.kl_ctrl.type)
    needs_name("unknown-kl-controller", key, kind, ("fixed", "adaptive"))
    if kind != "adaptive" or not run.our_loops or run.turnkey.rollout.rows_hold_turns:
        return
    # verl multiplies the coefficient by 1 +- 0.2 x rows / horizon, which must stay positive.
    horizon, rows = algorithm.kl_ctrl.horizon, run.config.data.train_batch_size * run.rollout.n
    rows *= run.turnkey.rollout.max_turns
    problem = (
        f"{key}=adaptive moves the coefficient by up to 0.2 x rows / algorithm.kl_ctrl.horizon={horizon} a step, and "
        f"{run.our_loops[0]} writes a row per turn, up to {rows}"
    )
    if rows >= 5 * horizon:
        refuse("kl-horizon", f"{problem}: its sign may change. Set kl_ctrl.horizon={10 * rows}, or {key}=fixed")
    warn("kl-horizon-counts-episodes", f"{problem}; each of these rows counts as an episode of the horizon")
