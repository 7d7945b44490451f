"""Checks of verl's keys under ``algorithm`` in the driver: estimators, rollout correction, group filtering, KL.

verl reports these after the first rollout, or ignores them.
"""

from __future__ import annotations

from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.config.foreign_keys import WITHOUT_INPUT
from verl_turnkey.plugins.config.resolve import CORRECTION, LOSS
from verl_turnkey.plugins.config.schema import TurnkeyConfig, closest
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
KL_PENALTIES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_CONTROLLERS = ("fixed", "adaptive")
FILTER = "algorithm.filter_groups"
IS_LEVELS = ("token", "sequence")
BYPASS_LOSSES = ("ppo_clip", "reinforce")
METRICS = ("reward", "acc", "env_return", "episode_length", "invalid_rate", "unparsed_rate")
"""metrics that turnkey_env reports per episode, besides ``composed_return.<component>``; ``reward`` is verl's name for
the composed return"""


def check_algorithm(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str]) -> None:
    """Refuse keys of former versions, weights that the run would not compute, and unknown names.

    ``loops``: the agent loops of the training rows.

    Raises:
        ConfigError: names the key to change.
    """
    for key, instead in FORMER.items():
        if (value := OmegaConf.select(config, key)) is not None:
            refuse("v0-key", f"{key}={value} is not read by verl's V1 trainers: write {instead}")
    _check_estimator(config)
    _check_correction(config)
    _check_filter(config, loops)
    _check_kl(config)
    _check_kl_control(config, turnkey, loops)


def _check_estimator(config: DictConfig) -> None:
    name = str(config.algorithm.adv_estimator)
    if name in WITHOUT_INPUT:
        refuse(
            "estimator-input",
            f"algorithm.adv_estimator={name} needs {WITHOUT_INPUT[name]}, which verl's V1 trainers do not provide: "
            "choose another one",
        )
    if config.algorithm.get("use_pf_ppo"):
        if name == "gae":
            refuse(
                "pf-ppo",
                "algorithm.use_pf_ppo=true resamples rows, and verl's V1 trainers then write advantages to the wrong "
                "rows: set it to false",
            )
        warn("pf-ppo-without-effect", f"algorithm.use_pf_ppo=true has no effect with algorithm.adv_estimator={name}")


def _check_correction(config: DictConfig) -> None:
    correction = config.algorithm.get("rollout_correction") or {}
    loss = str(config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla"))
    if loss == "bypass_mode":
        _check_bypass_loss(config, correction)
    if correction.get("bypass_mode") and not config.actor_rollout_ref.rollout.calculate_log_probs:
        refuse(
            "bypass-without-log-probs",
            f"{CORRECTION}.bypass_mode=true uses the rollout's log-probabilities as the old ones: set "
            "actor_rollout_ref.rollout.calculate_log_probs=true",
        )
    bypass = correction.get("bypass_mode") and loss != "bypass_mode"
    if bypass and (kind := correction.get("loss_type", BYPASS_LOSSES[0])) != BYPASS_LOSSES[0]:
        refuse(
            "loss-type-without-bypass",
            f"{CORRECTION}.loss_type={kind} is read only by the loss bypass_mode, but {LOSS}={loss}: set "
            f"{LOSS}=bypass_mode, or {CORRECTION}.loss_type={BYPASS_LOSSES[0]}",
        )
    for key in ("rollout_is", "rollout_rs"):
        if bypass and correction.get(key):
            because = " (+turnkey/loss=a3po sets it)" if loss == "a3po" else ""
            refuse(
                "correction-with-bypass",
                f"{CORRECTION}.{key}={correction[key]} is not computed with {CORRECTION}.bypass_mode=true{because}: "
                f"set {key}=null, or {LOSS}=bypass_mode, which computes it in the update, or bypass_mode=false with a "
                "loss that does not need it",
            )
        if correction.get(key) and not config.actor_rollout_ref.rollout.calculate_log_probs:
            refuse(
                "correction-without-log-probs",
                f"{CORRECTION}.{key}={correction[key]} compares with the rollout's log-probabilities: set "
                "actor_rollout_ref.rollout.calculate_log_probs=true",
            )
    _check_thresholds(correction)


def _check_bypass_loss(config: DictConfig, correction: DictConfig | dict) -> None:
    """Refuse settings for verl's loss ``bypass_mode`` that differ from those that verl's V1 trainers read."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    if not correction.get("bypass_mode"):
        refuse(
            "bypass-loss-without-bypass",
            f"{LOSS}=bypass_mode uses the rollout's log-probabilities as the old ones: set "
            f"{CORRECTION}.bypass_mode=true",
        )
    policy_loss, default = config.actor_rollout_ref.actor.policy_loss, RolloutCorrectionConfig()
    own = policy_loss.get("rollout_correction")
    if own is None:
        return
    where = LOSS.replace("loss_mode", "rollout_correction")
    for key, value in ((str(key), value) for key, value in correction.items()):
        is_default = value == getattr(default, key, value)
        if key != "bypass_mode" and not is_default and own.get(key, getattr(default, key)) != value:
            refuse(
                "correction-given-twice",
                f"{CORRECTION}.{key}={value} is ignored because {where} is set, which has {own.get(key)}: set "
                f"{where}.{key}={value}, or drop one of the two",
            )


def _check_thresholds(correction: DictConfig | dict) -> None:
    """Check levels and thresholds with verl's own parsers, which it calls only at the first advantages."""
    from verl.trainer.ppo import rollout_corr_helper as helper

    is_level, rejection = correction.get("rollout_is"), correction.get("rollout_rs")
    if is_level is not None and is_level not in IS_LEVELS:
        refuse(
            "unknown-rollout-is",
            f"there is no {CORRECTION}.rollout_is={is_level!r}{closest(str(is_level), list(IS_LEVELS))}; choices: "
            f"{', '.join(IS_LEVELS)}, null",
        )
    options = [part.strip() for part in str(rejection).split(",")] if rejection is not None else []
    known = sorted(helper.SUPPORTED_ROLLOUT_RS_OPTIONS)
    for option in options:
        if option not in known:
            refuse(
                "unknown-rollout-rs",
                f"there is no {CORRECTION}.rollout_rs={option!r}{closest(option, known)}; choices: "
                f"{', '.join(known)}, null",
            )
    for key, read in {
        "rollout_is_threshold": lambda value: is_level and helper._parse_rollout_is_threshold(value),
        "rollout_rs_threshold": lambda value: options and helper._parse_rollout_rs_thresholds(options, value),
    }.items():
        try:
            read(correction.get(key))
        except (TypeError, ValueError) as error:
            refuse("correction-threshold", f"{CORRECTION}.{key}={correction.get(key)}: {error}")


def _check_filter(config: DictConfig, loops: Collection[str]) -> None:
    """Refuse a metric that no episode has; not under verl's loops, whose metrics depend on the reward function."""
    if not OmegaConf.select(config, f"{FILTER}.enable"):
        return
    metric = OmegaConf.select(config, f"{FILTER}.metric")
    known = [name for name in METRICS if name != "reward" or name == internals.reward_metric()]
    if not metric:
        refuse(
            "filter-metric-missing",
            f"{FILTER}.enable=true compares a metric of the episodes: set {FILTER}.metric={known[0]}",
        )
    if {*loops} <= {*AGENT_LOOPS} and metric not in known and not str(metric).startswith("composed_return."):
        refuse(
            "unknown-filter-metric",
            f"there is no {FILTER}.metric={metric!r} with the agent loop {min(loops)} and verl "
            f"{internals.verl_version()}{closest(str(metric), known)}; choices: {', '.join(known)}, "
            "composed_return.<component>",
        )


def _check_kl(config: DictConfig) -> None:
    """Refuse an unknown KL penalty, which verl would refuse after the first rollout."""
    actor = config.actor_rollout_ref.actor
    used = {
        "actor_rollout_ref.actor.kl_loss_type": (actor.use_kl_loss, actor.kl_loss_type),
        "algorithm.kl_penalty": (config.algorithm.use_kl_in_reward, config.algorithm.kl_penalty),
    }
    for key, (on, name) in used.items():
        if on and str(name).removesuffix("+") not in KL_PENALTIES:
            refuse("unknown-kl-penalty", f"there is no {key}={name!r}{closest(str(name), list(KL_PENALTIES))}")


def _check_kl_control(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str]) -> None:
    """Check the coefficient of ``use_kl_in_reward``, which verl's controller reads only after Ray has started."""
    if not config.algorithm.use_kl_in_reward:
        return
    key, kind = "algorithm.kl_ctrl.type", str(config.algorithm.kl_ctrl.type)
    if kind not in KL_CONTROLLERS:
        refuse("unknown-kl-controller", f"there is no {key}={kind!r}{closest(kind, list(KL_CONTROLLERS))}")
    if kind != "adaptive" or not {*AGENT_LOOPS} & {*loops} or turnkey.rollout.rows_hold_turns:
        return
    # verl multiplies the coefficient by 1 +- 0.2 x rows / horizon, which must stay positive.
    horizon = config.algorithm.kl_ctrl.horizon
    rows = config.data.train_batch_size * config.actor_rollout_ref.rollout.n * turnkey.rollout.max_turns
    problem = (
        f"{key}=adaptive moves the coefficient by up to 0.2 x rows / algorithm.kl_ctrl.horizon={horizon} a step, and "
        f"{min({*AGENT_LOOPS} & {*loops})} writes a row per turn, up to {rows}"
    )
    if rows >= 5 * horizon:
        refuse("kl-horizon", f"{problem}: its sign may change. Set kl_ctrl.horizon={10 * rows}, or {key}=fixed")
    warn("kl-horizon-counts-episodes", f"{problem}; each of these rows counts as an episode of the horizon")
