"""Checks of verl's keys under ``algorithm``: estimators, rollout correction, group filtering, KL.

verl reports these after the first rollout, or ignores them.
"""

from __future__ import annotations

from omegaconf import DictConfig

from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import (
    ACTOR,
    FILTER,
    LOG_PROBS,
    Run,
    needs_name,
    needs_on,
)
from verl_turnkey.plugins.config.foreign_keys import WITHOUT_INPUT
from verl_turnkey.plugins.config.schema import closest
from verl_turnkey.plugins.credit.supplied import BYPASS
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
            refuse("v0-key", key=key, value=run.get(key), instead=instead)
    name = str(run.config.algorithm.adv_estimator)
    if name in WITHOUT_INPUT:
        refuse("estimator-input", name=name, input=WITHOUT_INPUT[name])
    if run.config.algorithm.get("use_pf_ppo") and name == "gae":
        refuse("pf-ppo")
    elif run.config.algorithm.get("use_pf_ppo"):
        warn("pf-ppo-without-effect", name=name)
    _check_correction(run)
    _check_filter(run)
    _check_kl(run)


def _check_correction(run: Run) -> None:
    correction, loss = run.config.algorithm.get("rollout_correction") or {}, run.loss_name
    if loss == "bypass_mode":
        _check_bypass_loss(run, correction)
    if correction.get("bypass_mode"):
        needs_on("bypass-without-log-probs", run, LOG_PROBS)
    bypass = correction.get("bypass_mode") and loss != "bypass_mode"
    if bypass and (kind := correction.get("loss_type", BYPASS_LOSSES[0])) != BYPASS_LOSSES[0]:
        refuse("loss-type-without-bypass", kind=kind, loss=loss)
    for key in (key for key in ("rollout_is", "rollout_rs") if correction.get(key)):
        if bypass:
            because = " (+turnkey/loss=a3po sets it)" if loss == "a3po" else ""
            refuse("correction-with-bypass", key=key, value=correction[key], because=because)
        needs_on("correction-without-log-probs", run, LOG_PROBS, key=key, value=correction[key])
    _check_thresholds(correction)


def _check_bypass_loss(run: Run, correction: DictConfig | dict) -> None:
    """Refuse settings for verl's loss ``bypass_mode`` that differ from those that verl's V1 trainers read."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    needs_on("bypass-loss-without-bypass", run, BYPASS)
    node, default = f"{ACTOR}.policy_loss.rollout_correction", RolloutCorrectionConfig()
    if (own := run.get(node)) is None:
        return
    for key, value in ((str(key), value) for key, value in correction.items()):
        is_default = value == getattr(default, key, value)
        if key != "bypass_mode" and not is_default and own.get(key, getattr(default, key)) != value:
            refuse("correction-given-twice", key=key, value=value, other=own.get(key))


def _check_thresholds(correction: DictConfig | dict) -> None:
    """Check levels and thresholds with verl's own parsers, which it calls only at the first advantages."""
    from verl.trainer.ppo import rollout_corr_helper as helper

    level, rejection = correction.get("rollout_is"), correction.get("rollout_rs")
    if level is not None and level not in IS_LEVELS:
        refuse(
            "unknown-rollout-is", level=level, closest=closest(str(level), [*IS_LEVELS]), choices=", ".join(IS_LEVELS)
        )
    options = [part.strip() for part in str(rejection).split(",")] if rejection is not None else []
    known = sorted(helper.SUPPORTED_ROLLOUT_RS_OPTIONS)
    for option in (option for option in options if option not in known):
        refuse("unknown-rollout-rs", option=option, closest=closest(option, known), choices=", ".join(known))
    for key, read in {
        "rollout_is_threshold": lambda value: level and helper._parse_rollout_is_threshold(value),
        "rollout_rs_threshold": lambda value: options and helper._parse_rollout_rs_thresholds(options, value),
    }.items():
        try:
            read(correction.get(key))
        except (TypeError, ValueError) as error:
            refuse("correction-threshold", key=key, value=correction.get(key), error=error)


def _check_filter(run: Run) -> None:
    """Refuse a metric that no episode has; not under verl's loops, whose metrics depend on the reward function."""
    if not run.get(FILTER):
        return
    metric = run.get(METRIC)
    known = [name for name in METRICS if name != "reward" or name == internals.reward_metric()]
    if not metric:
        refuse("filter-metric-missing", metric=known[0])
    elif {*run.loops} <= {*AGENT_LOOPS} and metric not in known and not str(metric).startswith("composed_return."):
        refuse(
            "unknown-filter-metric",
            metric=metric,
            loop=min(run.loops),
            version=internals.verl_version(),
            closest=closest(str(metric), known),
            choices=", ".join(known),
        )


def _check_kl(run: Run) -> None:
    """Refuse names and coefficients of KL, which verl reads after the first rollout, or once Ray has started."""
    algorithm = run.config.algorithm
    used = {f"{ACTOR}.kl_loss_type": run.actor.use_kl_loss, "algorithm.kl_penalty": algorithm.use_kl_in_reward}
    for key in (key for key, on in used.items() if on):
        needs_name("unknown-kl-penalty", str(run.get(key)).removesuffix("+"), KL_PENALTIES, key=key)
    if not algorithm.use_kl_in_reward:
        return
    key, kind = "algorithm.kl_ctrl.type", str(algorithm.kl_ctrl.type)
    needs_name("unknown-kl-controller", kind, ("fixed", "adaptive"))
    if kind != "adaptive" or not run.our_loops or run.turnkey.rollout.rows_hold_turns:
        return
    # verl multiplies the coefficient by 1 +- 0.2 x rows / horizon, which must stay positive.
    horizon, rows = algorithm.kl_ctrl.horizon, run.config.data.train_batch_size * run.rollout.n
    rows *= run.turnkey.rollout.max_turns
    if rows >= 5 * horizon:
        refuse("kl-horizon", horizon=horizon, loop=run.our_loops[0], rows=rows, enough=10 * rows)
    warn("kl-horizon-counts-episodes", horizon=horizon, loop=run.our_loops[0], rows=rows)
