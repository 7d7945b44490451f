"""Checks of the method: verl's keys under ``algorithm``, the critic's heads, and settings rarely intended together.

verl reports these after the first rollout, or ignores them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from omegaconf import DictConfig

from verl_turnkey.advantage.paper_names import known_as
from verl_turnkey.plugins.checks.files import LOOP_COLUMN
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.rewards import check_bounds, supplied_columns
from verl_turnkey.plugins.checks.run import ACTOR, ESTIMATOR, FILTER, LOG_PROBS, OURS, CheckedRun, heads_of
from verl_turnkey.plugins.checks.update import warn_ignored
from verl_turnkey.plugins.config.checkpoint_files import FSDP
from verl_turnkey.plugins.config.foreign_keys import WITHOUT_INPUT
from verl_turnkey.plugins.config.schema import closest
from verl_turnkey.plugins.credit.rows import DERIVED_COLUMNS, listed_per_turn, needs_record
from verl_turnkey.plugins.credit.trainer_columns import BYPASS, check_supplied
from verl_turnkey.plugins.rollout.token_spans import STREAM_FORMAT
from verl_turnkey.plugins.verl_api import internals, ledger
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS, VERLS_LOOPS

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


def check_algorithm(run: CheckedRun) -> None:
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


def _check_correction(run: CheckedRun) -> None:
    correction, loss = run.config.algorithm.get("rollout_correction") or {}, run.loss_name
    if loss == "bypass_mode":
        _check_bypass_loss(run, correction)
    if correction.get("bypass_mode"):
        run.needs_on("bypass-without-log-probs", LOG_PROBS)
    bypass = correction.get("bypass_mode") and loss != "bypass_mode"
    if bypass and (kind := correction.get("loss_type", BYPASS_LOSSES[0])) != BYPASS_LOSSES[0]:
        refuse("loss-type-without-bypass", kind=kind, loss=loss)
    for key in (key for key in ("rollout_is", "rollout_rs") if correction.get(key)):
        if bypass:
            because = " (+turnkey/loss=a3po sets it)" if loss == "a3po" else ""
            refuse("correction-with-bypass", key=key, value=correction[key], because=because)
        run.needs_on("correction-without-log-probs", LOG_PROBS, key=key, value=correction[key])
    _check_thresholds(correction)


def _check_bypass_loss(run: CheckedRun, correction: DictConfig | dict) -> None:
    """Refuse settings for verl's loss ``bypass_mode`` that differ from those that verl's V1 trainers read."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig

    run.needs_on("bypass-loss-without-bypass", BYPASS)
    of_loss, default = run.get(f"{ACTOR}.policy_loss.rollout_correction"), RolloutCorrectionConfig()
    if of_loss is None:
        return
    for key, value in correction.items():
        is_default = value == getattr(default, str(key), value)
        if key != "bypass_mode" and not is_default and of_loss.get(key, getattr(default, str(key))) != value:
            refuse("correction-given-twice", key=key, value=value, other=of_loss.get(key))


def _check_thresholds(correction: DictConfig | dict) -> None:
    """Check levels and thresholds with verl's own parsers, which it calls only at the first advantages."""
    from verl.trainer.ppo import rollout_corr_helper as helper

    level, rejection = correction.get("rollout_is"), correction.get("rollout_rs")
    if level is not None and level not in IS_LEVELS:
        hint, choices = closest(str(level), [*IS_LEVELS]), ", ".join(IS_LEVELS)
        refuse("unknown-rollout-is", level=level, closest=hint, choices=choices)
    options = [part.strip() for part in str(rejection).split(",")] if rejection is not None else []
    supported = sorted(helper.SUPPORTED_ROLLOUT_RS_OPTIONS)
    for option in (option for option in options if option not in supported):
        refuse("unknown-rollout-rs", option=option, closest=closest(option, supported), choices=", ".join(supported))
    for key, read in {
        "rollout_is_threshold": lambda value: level and helper._parse_rollout_is_threshold(value),
        "rollout_rs_threshold": lambda value: options and helper._parse_rollout_rs_thresholds(options, value),
    }.items():
        try:
            read(correction.get(key))
        except (TypeError, ValueError) as error:
            refuse("correction-threshold", key=key, value=correction.get(key), error=error)


def _check_filter(run: CheckedRun) -> None:
    """Refuse a metric that no episode has; not under verl's loops, whose metrics depend on the reward function."""
    if not run.get(FILTER):
        return
    metric = run.get(METRIC)
    metrics = [name for name in METRICS if name != "reward" or name == internals.reward_metric()]
    if not metric:
        refuse("filter-metric-missing", metric=metrics[0])
    elif {*run.loops} <= {*AGENT_LOOPS} and metric not in metrics and not str(metric).startswith("composed_return."):
        loop, version = min(run.loops), internals.verl_version()
        hint, choices = closest(str(metric), metrics), ", ".join(metrics)
        refuse("unknown-filter-metric", metric=metric, loop=loop, version=version, closest=hint, choices=choices)


def _check_kl(run: CheckedRun) -> None:
    """Refuse names and coefficients of KL, which verl reads after the first rollout, or once Ray has started."""
    algorithm = run.config.algorithm
    used = {f"{ACTOR}.kl_loss_type": run.actor.use_kl_loss, "algorithm.kl_penalty": algorithm.use_kl_in_reward}
    for key in (key for key, on in used.items() if on):
        run.needs_name("unknown-kl-penalty", str(run.get(key)).removesuffix("+"), KL_PENALTIES, key=key)
    if not algorithm.use_kl_in_reward:
        return
    key, kind = "algorithm.kl_ctrl.type", str(algorithm.kl_ctrl.type)
    run.needs_name("unknown-kl-controller", kind, ("fixed", "adaptive"))
    if kind != "adaptive" or not run.our_loops or run.turnkey.rollout.rows_hold_turns:
        return
    # verl multiplies the coefficient by 1 +- 0.2 x rows / horizon, which must stay positive.
    horizon, rows = algorithm.kl_ctrl.horizon, run.config.data.train_batch_size * run.rollout.n
    rows *= run.turnkey.rollout.max_turns
    if rows >= 5 * horizon:
        refuse("kl-horizon", horizon=horizon, loop=run.our_loops[0], rows=rows, enough=10 * rows)
    warn("kl-horizon-counts-episodes", horizon=horizon, loop=run.our_loops[0], rows=rows)


# verl's keys that a turnkey estimator does not read: their defaults, and the parameter of ours that means the same.
IGNORED_ALGORITHM_KEYS = {"gamma": (1.0, "gamma"), "lam": (1.0, "lam"), "norm_adv_by_std_in_grpo": (True, "norm")}


def check_estimator(run: CheckedRun) -> None:
    spec, config, params = run.estimator, run.config, run.params
    assert spec is not None
    if not run.our_trainer:
        refuse("estimator-trainer", method=spec.name, mode=run.mode)
    ledger.verify(("estimator",), (str(config.algorithm.adv_estimator),))
    for module in getattr(params, "requires", ()):
        if find_spec(module) is None:
            refuse("method-package-missing", method=spec.name, module=module)
    # Both compare the episodes of a group.
    compares = hasattr(params, "norm") or getattr(params, "singleton", None) == "zero"
    if run.rollout.n == 1 and not run.trains_branches and compares:
        warn("single-rollout", method=spec.name)
    if "value" in run.columns and not run.use_critic:
        refuse("critic-missing", method=spec.name)
    check_bounds(run)
    warn_ignored(config.algorithm, "algorithm", IGNORED_ALGORITHM_KEYS, spec, "turnkey.credit")


def check_trainer(run: CheckedRun) -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    run.needs_name("unknown-turnkey-trainer", run.mode, ledger.TRAINERS)
    if not run.config.trainer.use_v1:
        refuse("trainer-v1", mode=run.mode)
    if run.config.algorithm.adv_estimator is None:
        refuse("estimator-missing")
    # verl would find out after the first rollout.
    elif (name := str(run.config.algorithm.adv_estimator)) not in ADV_ESTIMATOR_REGISTRY:
        instead = known_as(name) or closest(name, [*ADV_ESTIMATOR_REGISTRY])
        refuse("unknown-estimator", name=name, instead=instead)


def check_warm_up(run: CheckedRun) -> None:
    if not run.use_critic and (warm_up := run.config.trainer.get("critic_warmup") or 0) > 1:
        refuse("critic-warmup-without-critic", warm_up=warm_up)


def check_recorded(run: CheckedRun) -> None:
    """Refuse batches that mix rows with and without records, and methods that need records where there are none."""
    if run.verls_loops and run.our_loops:
        method, recorded, unrecorded = run.value_text(ESTIMATOR), run.our_loops[0], run.verls_loops[0]
        refuse("mixed-agent-loops", method=method, recorded=recorded, unrecorded=unrecorded)
    for loop in run.verls_loops:
        _check_derived(run, loop)


def _check_derived(run: CheckedRun, loop: str) -> None:
    """Refuse a method that needs columns which rows of verl's loops, without a record, do not provide."""
    spec, needed = run.estimator, run.columns
    assert spec is not None
    per_turn = {f"extra.{name}" for name in listed_per_turn(run.rollout) if name in VERLS_LOOPS[loop]}
    lacking = [column for column in needed if column not in {*DERIVED_COLUMNS, *supplied_columns(run), *per_turn}]
    if lacking:
        from_data = loop != run.rollout.agent.default_agent_loop
        cause = f"the agent loop is {loop}, by the data's column {LOOP_COLUMN!r}, which overrides default_agent_loop: "
        refuse("columns-without-record", message=(cause if from_data else "") + needs_record(spec.name, lacking))
    if run.get(BYPASS):
        names = [spec.name, *(modification.spec.name for modification in run.modifiers)]
        check_supplied(names, [column for column in needed if column not in per_turn])


# verl's estimators that treat each row as a rollout, and our method that makes the same comparison by steps.
# Under grpo verl itself takes the last row of an episode; gae works on tokens.
BY_ROWS = {
    "rloo": "rloo_steps",
    "rloo_vectorized": "rloo_steps",
    "opo": "rloo_steps",
    "gpg": "grpo_steps with turnkey.credit.norm=mean",
    "grpo_passk": "maxrl",
    "grpo_vectorized": "grpo_steps",
    "reinforce_plus_plus": "rebn",
    "reinforce_plus_plus_baseline": "seeupo",
}
# Methods without a part that sums an episode's rewards without a discount.
DISCOUNTED = ("rebn", "turn_gae", "vc_gae", "turn_norm", "marshal", "hae")
# verl's estimators that discount rewards per token: they do not compare sums over an episode's steps.
BY_TOKENS = ("gae", "reinforce_plus_plus")


def warn_of_combinations(run: CheckedRun) -> None:
    """Warn of each such combination."""
    method, options = run.estimator, run.turnkey.rollout
    for message in _combinations(run):
        warn("combination", message=message)
    if run.loss_name.removeprefix("turnkey/") == "rebel" and run.strategy and run.strategy.trains:
        warn("rebel-branches", strategy=run.strategy.name)
    if run.our_loops and method is not None and method.name == "loo_td":
        horizon = run.params.horizon
        if horizon is not None and horizon > options.max_turns:
            warn("horizon-beyond-turns", horizon=horizon, turns=options.max_turns)


def _combinations(run: CheckedRun) -> Iterator[str]:
    method, options, name = run.estimator, run.turnkey.rollout, str(run.config.algorithm.adv_estimator)
    if name in BY_ROWS and run.our_loops and not options.rows_hold_turns:
        yield (
            f"algorithm.adv_estimator={name} treats each row as a rollout, and {run.our_loops[0]} writes a row per "
            f"step: a long episode counts as often as it has steps. To compare episodes use +turnkey={BY_ROWS[name]}"
        )
    discounts = method is not None and method.name in DISCOUNTED
    gamma = float(getattr(run.params, "gamma", 1.0)) if discounts else 1.0
    outcomes = f"turnkey.credit.gamma={gamma}" if discounts else "outcomes without a discount"
    for entry in run.turnkey.rewards if name not in BY_TOKENS else ():
        if entry.get("name") == "potential" and not entry.get("column") and entry.get("gamma") != gamma:
            changes = f"potential with gamma={entry.get('gamma')} changes which policy is best"
            compares = f"{method.name if method else name} compares {outcomes}"
            yield f"turnkey.rewards: {changes}, since {compares}: set its gamma to {gamma}"
    if method is None or method.name != "hgpo" or OURS not in run.loops or options.prompt != "template":
        return
    if (compared := run.params.history) != options.history:
        both = f"turnkey.credit.history={compared} and turnkey.rollout.history={options.history}"
        meant = "hgpo is meant to compare as many past states as the prompts show"
        yield f"{both}: {meant}: set both to the same number"


def check_value_heads(run: CheckedRun) -> None:
    """Refuse a critic that cannot have the heads that the method reads."""
    if not run.use_critic or not (heads := heads_of(run.config, run.turnkey)):
        return
    critic, method, number = run.config.critic, run.value_text(ESTIMATOR), len(heads)
    if (strategy := str(critic.strategy)) not in FSDP:
        refuse("heads-engine", method=method, number=number, strategy=strategy)
    if rank := run.get("critic.model.lora_rank"):
        refuse("heads-lora", method=method, number=number, rank=rank)
    if (mean := str(critic.loss_agg_mode)) != "token-mean":
        warn("heads-aggregation", mean=mean, method=method, number=number)


def check_streams(run: CheckedRun) -> None:
    """Refuse modifiers of tokens where the method gives the tokens of each decision of a turn their own advantages."""
    method, by_token = run.estimator, [modifier.spec.name for modifier in run.modifiers if modifier.by_token]
    in_streams = run.turnkey.rollout.action_format == STREAM_FORMAT
    if by_token and method and "subgoal_advantages" in method.gives and in_streams:
        refuse("streams-and-tokens", method=method.name, modifier=by_token[0])
