"""Checks of rewards in the driver: components, columns, verl's reward functions, distillation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import EstimatorSpec, ModifierSpec
from verl_turnkey.advantage.registry import how_to_set
from verl_turnkey.envs.rewards import LOOPS_OWN, Composition, column_clash, compose, rewards
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.value_heads import heads_of
from verl_turnkey.plugins.checks.values import is_number
from verl_turnkey.plugins.config.schema import (
    TurnkeyConfig,
    credit_modify,
    credit_params,
    estimator_of,
    reward_entries,
)
from verl_turnkey.plugins.credit.supplied import BYPASS, check_supplied, from_trainer
from verl_turnkey.plugins.rollout.strategies import INDEPENDENT, KEY, read_strategy
from verl_turnkey.plugins.rollout.streams import COLUMNS, FORMAT
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

FUNCTION = "reward.custom_reward_function.path"


def check_rewards(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str] = ("turnkey_env",)) -> Composition:
    """Compose ``turnkey.rewards`` for the loop turnkey_env, and refuse settings that it would ignore or count twice.

    verl's reward functions score only rows without a score, which other ``loops`` of the training rows write.

    Raises:
        ConfigError: names the key to change and the way out.
    """
    if {*loops} <= {*AGENT_LOOPS}:
        _check_verls(config, turnkey, min(loops))
    _check_distillation(config)
    composition = compose(reward_entries(config, turnkey))
    spec = estimator_of(config)
    before = () if spec is None else spec.names_before(credit_modify(config, turnkey))
    late = {name for name, reward in rewards().items() if reward.hindsight}
    for i, entry in enumerate(turnkey.rewards):
        if entry["name"] in late and (column := entry.get("column")) in before:
            refuse(
                "reward-of-outcome-as-state",
                f"turnkey.rewards[{i}] ({entry['name']}, column: {column}): it rates a step by its outcome, but "
                f"{column} describes the state before the step: add it by a component of your own, which sees that "
                "state, or in the environment's info['extra']",
            )
    penalty = 0.0 if spec is None else turnkey.rollout.invalid_action_penalty  # verl's estimators never see it
    for i, entry in enumerate(turnkey.rewards):
        pays = entry.get("column") is None and entry.get("weight")  # a column is not part of the reward
        if entry["name"] == "invalid" and pays and penalty:
            refuse(
                "invalid-counted-twice",
                f"turnkey.rewards[{i}] (invalid, weight {entry['weight']}) and "
                f"turnkey.rollout.invalid_action_penalty={penalty} would count an invalid action twice: set "
                "turnkey.rollout.invalid_action_penalty=0, or leave the component out",
            )
    return composition


def check_compared(config: DictConfig, turnkey: TurnkeyConfig, composition: Composition) -> None:
    """Refuse a component that compares a task's rollouts if training plays only one, or if some are branches.

    Raises:
        ConfigError: names the key to change.
    """
    component = composition.compares
    if component is None:
        return
    if config.actor_rollout_ref.rollout.n < 2:
        refuse(
            "compared-single-rollout",
            f"{component} compares the rollouts of a task with each other: set actor_rollout_ref.rollout.n to 2 or "
            f"more, got {config.actor_rollout_ref.rollout.n}",
        )
    strategy = read_strategy(turnkey.rollout.strategy)
    if strategy is not None and strategy[0].clones:
        refuse(
            "compared-branching",
            f"{component} compares the rollouts of a task, and {KEY}={strategy[0].name} plays branches of them, which "
            f"this component does not reward: set {KEY} to {INDEPENDENT}, or to one that only queries the model "
            "(probe, probe_gold)",
        )


def check_bounds(specs: list[EstimatorSpec | ModifierSpec], config: DictConfig, turnkey: TurnkeyConfig) -> None:
    """Refuse KL or a model's scores in the reward for methods that expect outcomes within bounds: they move them out.

    Raises:
        ConfigError: names the key to change.
    """
    bounded = [spec.name for spec in specs if spec.bounded_outcomes]
    if bounded and config.algorithm.use_kl_in_reward:
        refuse(
            "bounded-kl-in-reward",
            f"algorithm.use_kl_in_reward=true moves outcomes out of the bounds that {bounded[0]} expects: set "
            "it to false, and actor_rollout_ref.actor.use_kl_loss=true for a KL penalty",
        )
    if bounded and turnkey.prm.kind is not None and turnkey.prm.use != "column":
        refuse(
            "bounded-prm",
            f"turnkey.prm.use={turnkey.prm.use} moves outcomes out of the bounds that {bounded[0]} expects: set "
            "turnkey.prm.use=column, or take a method without bounds, such as +turnkey=grpo_steps",
        )
    costs = {str(entry.get("name")): reason for entry in turnkey.rewards if (reason := _below_zero(entry))}
    if bounded and costs:
        name, reason = next(iter(costs.items()))
        warn(
            "bounded-negative-outcome",
            f"turnkey.rewards: {name} {reason}, and {bounded[0]} expects no outcome below 0",
        )
    noisy = [f"turnkey.rewards ({name})" for name in costs if name != "outcome"]  # which is equal for all failures
    if config.algorithm.use_kl_in_reward:
        noisy.insert(0, "algorithm.use_kl_in_reward=true")
    if noisy and "mc_grpo" in [spec.name for spec in specs]:
        warn(
            "noisy-outcomes",
            f"{noisy[0]} makes equal outcomes differ a little, and mc_grpo multiplies by a count of the outcomes that "
            "differ from the median: its credit shrinks by up to the size of the group",
        )


def _below_zero(entry: Mapping[str, Any]) -> str:
    """Why a component of ``turnkey.rewards`` may move a failure's outcome below 0; empty: it does not."""
    weight = entry.get("weight", 1)
    if entry.get("column") is not None or not is_number(weight) or not weight:
        return ""
    if entry.get("name") == "potential":
        return "gives an episode minus its first state's potential"
    lost = entry.get("lost", 0) if entry.get("name") == "outcome" else 0
    if is_number(lost) and lost * weight < 0:
        return f"gives a failure {lost * weight:g}"
    return "has a negative weight" if weight < 0 else ""


def supplied_columns(config: DictConfig, turnkey: TurnkeyConfig) -> set[str]:
    """The columns that the trainer of this configuration supplies."""
    critic = bool(OmegaConf.select(config, "critic.enable"))
    heads = {f"extra.value_{head.name}" for head in heads_of(config, turnkey)} if critic else set()
    return from_trainer(turnkey.prm.kind, critic=critic) | heads


def check_columns(
    config: DictConfig,
    turnkey: TurnkeyConfig,
    env_columns: set[str] | None,
    reward_columns: Collection[str],
    strategy_columns: Collection[str] = (),
) -> None:
    """Refuse a column that a method reads and nothing provides, and one that has two sources.

    ``env_columns``: those that the probe saw in the environment's ``info["extra"]``; None without a valid step.
    ``reward_columns``, ``strategy_columns``: those that reward components and the rollout strategy add.

    Raises:
        ConfigError: names the column and how to provide it.
    """
    if env_columns is None:
        return
    if clash := sorted(env_columns & {*reward_columns}):
        refuse("reward-column-clash", f"turnkey.rewards: {column_clash(clash[0])}")
    if clash := sorted(env_columns & {*strategy_columns}):
        refuse(
            "strategy-column-clash",
            f"turnkey.rollout.strategy adds the column {clash[0]}, and so does the environment in info['extra']: drop "
            "it there, or set turnkey.rollout.strategy=independent",
        )
    spec = estimator_of(config)
    needs = [] if spec is None else [(spec.name, spec.columns(credit_params(config, turnkey)))]
    needs += [
        (f"{modifier.spec.name} (turnkey.credit.modify)", modifier.columns)
        for modifier in credit_modify(config, turnkey)
    ]
    of_format = COLUMNS if turnkey.rollout.action_format == FORMAT else ()
    known = {f"extra.{name}" for name in (*env_columns, *reward_columns, *strategy_columns, *LOOPS_OWN, *of_format)}
    known |= supplied_columns(config, turnkey)
    before = () if spec is None else spec.names_before(credit_modify(config, turnkey))
    for reader, needed in needs:
        if lacking := [column for column in needed if column.startswith("extra.") and column not in known]:
            refuse(
                "reward-column-missing",
                f"{reader} needs the column {lacking[0]!r}, which the first task's environment does not give: "
                f"{how_to_set(lacking[0], before)}",
            )
    if OmegaConf.select(config, BYPASS):
        for reader, needed in needs:
            check_supplied([reader], {*needed} - {f"extra.{name}" for name in (*env_columns, *reward_columns)})


def _check_verls(config: DictConfig, turnkey: TurnkeyConfig, loop: str) -> None:
    function = OmegaConf.select(config, FUNCTION)
    calls_function = any(entry.get("name") == "verl" for entry in turnkey.rewards)
    if function and not calls_function:
        refuse(
            "reward-function-uncalled",
            f"{FUNCTION}={function} is not called: the rewards of the agent loop {loop} are turnkey.rewards. Add "
            "its value to them with 'turnkey.rewards=[{name: step},{name: verl}]', or drop it",
        )
    if config.reward.reward_model.enable:
        refuse(
            "reward-model-uncalled",
            f"reward.reward_model.enable=true has no effect on the agent loop {loop}, whose rewards are "
            "turnkey.rewards: set it to false and ask the model with the component judge "
            "(turnkey.rewards=[{name: judge, url: ..., model: ...}]) or with a function of your own",
        )
    if url := OmegaConf.select(config, "reward.sandbox_fusion.url"):
        warn(
            "sandbox-uncalled",
            f"reward.sandbox_fusion.url={url} has no effect with the agent loop {loop}, whose rewards are "
            "turnkey.rewards",
        )
    manager = config.reward.reward_manager
    if manager.name != "naive" or manager.source != "register":
        warn(
            "reward-manager-uncalled",
            f"reward.reward_manager.name={manager.name} has no effect with the agent loop {loop}, whose "
            "rewards are turnkey.rewards",
        )


def _check_distillation(config: DictConfig) -> None:
    if OmegaConf.select(config, "distillation.enabled"):
        refuse(
            "distillation-agent-loop",
            "distillation.enabled=true provides the teacher's log-probabilities only for an episode's last row, but "
            "the agent loop turnkey_env writes a row per step: set distillation.enabled=false",
        )
