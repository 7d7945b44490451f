"""Checks of rewards in the driver: components, columns, verl's reward functions, distillation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import EstimatorSpec, ModifierSpec
from verl_turnkey.advantage.registry import FROM_TRAINER, how_to_set
from verl_turnkey.envs.rewards import LOOPS_OWN, Composition, column_clash, compose, rewards
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.values import is_number
from verl_turnkey.plugins.config.schema import (
    TurnkeyConfig,
    credit_modify,
    credit_params,
    estimator_of,
    reward_entries,
)
from verl_turnkey.plugins.credit.supplied import BYPASS, check_supplied
from verl_turnkey.plugins.rollout.strategies import INDEPENDENT, KEY, read_strategy
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

FUNCTION = "reward.custom_reward_function.path"


def check_rewards(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str] = ("turnkey_env",)) -> Composition:
    """Compose the rewards of the loop turnkey_env, and refuse settings that it would ignore or count twice.

    They are those of ``turnkey.rewards``: verl's reward functions see only rows that come without a score, as
    those of the other ``loops`` of the training rows.

    Raises:
        ConfigError: names the key to change and the way out.
    """
    if {*loops} <= {*AGENT_LOOPS}:
        _check_verls(config, turnkey, min(loops))
    _check_distillation(config)
    composition = compose(reward_entries(config, turnkey))
    spec = estimator_of(config)
    before = () if spec is None else spec.names_before
    late = {name for name, reward in rewards().items() if reward.hindsight}
    for i, entry in enumerate(turnkey.rewards):
        if entry["name"] in late and (column := entry.get("column")) in before:
            refuse(
                "reward-of-outcome-as-state",
                f"turnkey.rewards[{i}] ({entry['name']}, column: {column}): it rates a step by what came of it, and "
                f"{column} is about the state before the step: give it with a component of your own, which sees that "
                "state, or in the environment's info['extra']",
            )
    penalty = 0.0 if spec is None else turnkey.rollout.invalid_action_penalty  # verl's estimators never see it
    for i, entry in enumerate(turnkey.rewards):
        pays = entry.get("column") is None and entry.get("weight")  # a column is no part of the reward
        if entry["name"] == "invalid" and pays and penalty:
            refuse(
                "invalid-counted-twice",
                f"turnkey.rewards[{i}] (invalid, weight {entry['weight']}) and "
                f"turnkey.rollout.invalid_action_penalty={penalty} would count an invalid action twice: set "
                "turnkey.rollout.invalid_action_penalty=0, or leave the component out",
            )
    return composition


def check_compared(config: DictConfig, turnkey: TurnkeyConfig, composition: Composition) -> None:
    """Refuse a component that compares a task's rollouts where training has one of them, or where some are branches.

    Raises:
        ConfigError: names the key to change.
    """
    what = composition.compares
    if what is None:
        return
    if config.actor_rollout_ref.rollout.n < 2:
        refuse(
            "compared-single-rollout",
            f"{what} compares the rollouts of a task with each other: set actor_rollout_ref.rollout.n to 2 or more, "
            f"got {config.actor_rollout_ref.rollout.n}",
        )
    strategy = read_strategy(turnkey.rollout.strategy)
    if strategy is not None and strategy[0].clones:
        refuse(
            "compared-branching",
            f"{what} compares the rollouts of a task, and {KEY}={strategy[0].name} plays branches of them, which would "
            f"be paid without it: set {KEY} to {INDEPENDENT}, or to one that only asks (probe, probe_gold)",
        )


def check_bounds(
    specs: list[EstimatorSpec | ModifierSpec], config: DictConfig, rewards: Sequence[Mapping[str, Any]]
) -> None:
    """Refuse KL in the reward of what reads outcomes in known bounds, which the KL leaves after the first rollout.

    Raises:
        ConfigError: names the key to change.
    """
    bounded = [spec.name for spec in specs if spec.bounded_outcomes]
    if bounded and config.algorithm.use_kl_in_reward:
        refuse(
            "bounded-kl-in-reward",
            f"algorithm.use_kl_in_reward=true moves outcomes out of the bounds in which {bounded[0]} reads them: set "
            "it to false, and actor_rollout_ref.actor.use_kl_loss=true for a KL penalty",
        )
    costs = {str(entry.get("name")): reason for entry in rewards if (reason := _below_zero(entry))}
    if bounded and costs:
        name, reason = next(iter(costs.items()))
        warn(
            "bounded-negative-outcome",
            f"turnkey.rewards: {name} {reason}, and a failure's outcome below 0 is out of the bounds in which "
            f"{bounded[0]} reads outcomes",
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


def check_columns(
    config: DictConfig,
    turnkey: TurnkeyConfig,
    given: set[str] | None,
    columns: Collection[str],
    forked: Collection[str] = (),
) -> None:
    """Refuse a method that reads a column which nobody gives, and one of both the environment and somebody else.

    ``given``: what the probe saw in the environment's ``info["extra"]``; None when it saw no valid step. ``columns``:
    those that reward components give. ``forked``: those that the strategy of rollouts gives.

    Raises:
        ConfigError: names the column and how a rollout comes to have it.
    """
    if given is None:
        return
    if clash := sorted(given & {*columns}):
        refuse("reward-column-clash", f"turnkey.rewards: {column_clash(clash[0])}")
    if clash := sorted(given & {*forked}):
        refuse(
            "strategy-column-clash",
            f"turnkey.rollout.strategy gives the column {clash[0]}, and so does the environment in info['extra']: take "
            "it out there, or set turnkey.rollout.strategy=independent",
        )
    spec = estimator_of(config)
    needs = [] if spec is None else [(spec.name, spec.columns(credit_params(config, turnkey)))]
    needs += [(f"{one.spec.name} (turnkey.credit.modify)", one.columns) for one in credit_modify(config, turnkey)]
    known = {f"extra.{name}" for name in (*given, *columns, *forked, *LOOPS_OWN)} | {*FROM_TRAINER}
    before = () if spec is None else spec.names_before
    for who, wanted in needs:
        if lacking := [column for column in wanted if column.startswith("extra.") and column not in known]:
            refuse(
                "reward-column-missing",
                f"{who} needs the column {lacking[0]!r}, which the first task's environment does not give: "
                f"{how_to_set(lacking[0], before)}",
            )
    if OmegaConf.select(config, BYPASS):
        for who, wanted in needs:
            check_supplied([who], {*wanted} - {f"extra.{name}" for name in (*given, *columns)})


def _check_verls(config: DictConfig, turnkey: TurnkeyConfig, loop: str) -> None:
    function = OmegaConf.select(config, FUNCTION)
    asked = any(entry.get("name") == "verl" for entry in turnkey.rewards)
    if function and not asked:
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
            "distillation.enabled=true gives the teacher's log-probabilities of an episode's last row only, and the "
            "agent loop turnkey_env writes a row per step: set distillation.enabled=false",
        )
