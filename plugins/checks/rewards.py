"""Checks of rewards: components, columns, verl's reward functions, distillation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from verl_turnkey.advantage import EstimatorSpec, ModifierSpec
from verl_turnkey.advantage.registry import how_to_set
from verl_turnkey.envs.rewards import LOOPS_OWN, Composition, column_clash, compose, rewards
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import KL, CheckedRun, heads_of
from verl_turnkey.plugins.checks.scorers import OF_GROUPS
from verl_turnkey.plugins.checks.values import is_number
from verl_turnkey.plugins.config.schema import reward_entries
from verl_turnkey.plugins.credit.trainer_columns import BYPASS, check_supplied, from_trainer
from verl_turnkey.plugins.rollout.token_spans import STREAM_COLUMNS, STREAM_FORMAT
from verl_turnkey.plugins.teacher import read_source
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

FUNCTION = "reward.custom_reward_function.path"


def check_rewards(run: CheckedRun) -> Composition:
    """Compose ``turnkey.rewards``, and refuse settings that our agent loops would ignore or count twice.

    verl's reward functions score only rows without a score, which other agent loops write.
    """
    turnkey, method = run.turnkey, run.estimator
    if {*run.loops} <= {*AGENT_LOOPS}:
        _check_verls(run)
    run.needs_off("distillation-agent-loop", "distillation.enabled")
    composition = compose(reward_entries(run.config, turnkey))
    late = {name for name, reward in rewards().items() if reward.hindsight}
    penalty = 0.0 if method is None else turnkey.rollout.invalid_action_penalty  # verl's estimators never see it
    for i, entry in enumerate(turnkey.rewards):
        name, column = entry["name"], entry.get("column")
        if name in late and column in run.columns_before:
            refuse("reward-of-outcome-as-state", i=i, name=name, column=column)
        if name == "invalid" and column is None and entry.get("weight") and penalty:  # a column adds nothing to it
            refuse("invalid-counted-twice", i=i, weight=entry["weight"], penalty=penalty)
    return composition


def check_compared(run: CheckedRun, composition: Composition) -> None:
    """Refuse a component that compares a task's rollouts if training plays only one, or if some are branches."""
    component = composition.compares
    if component is None:
        return
    if run.rollout.n < 2:
        refuse("compared-single-rollout", component=component, n=run.rollout.n)
    if run.strategy and run.strategy.clones:
        refuse("compared-branching", component=component, strategy=run.strategy.name)


def check_bounds(run: CheckedRun) -> None:
    """Refuse KL or a model's scores in the reward for methods that expect outcomes within bounds."""
    specs: list[EstimatorSpec | ModifierSpec] = [modification.spec for modification in run.modifiers]
    specs = [run.estimator, *specs] if run.estimator else specs
    bounded, kl = [spec.name for spec in specs if spec.bounded_outcomes], run.config.algorithm.use_kl_in_reward
    if bounded and kl:
        refuse("bounded-kl-in-reward", method=bounded[0])
    prm = run.turnkey.prm
    if bounded and prm.kind is not None and prm.use != "column":
        refuse("bounded-prm", use=prm.use, method=bounded[0])
    costs = {str(entry.get("name")): reason for entry in run.turnkey.rewards if (reason := _below_zero(entry))}
    if bounded and costs:
        name, reason = next(iter(costs.items()))
        warn("bounded-negative-outcome", name=name, reason=reason, method=bounded[0])
    noisy = [f"turnkey.rewards ({name})" for name in costs if name != "outcome"]  # which is equal for all failures
    noisy = [f"{KL}=true", *noisy] if kl else noisy
    if noisy and "mc_grpo" in [spec.name for spec in specs]:
        warn("noisy-outcomes", cause=noisy[0])


def check_success(run: CheckedRun) -> None:
    """Warn where a score above 0 counts as success, because rows without a record have no flag."""
    if not run.verls_loops:
        return
    teacher, prm = run.turnkey.teacher, run.turnkey.prm
    most, never = "to the most that a failure may score", f"{FUNCTION} to one that gives failures at most 0"
    readers = {
        f"{modifier.spec.name} (turnkey.credit.modify)": f"its parameter success {most}"
        for modifier in run.modifiers
        if getattr(modifier.params, "success", 0.0) is None
    }
    if prm.kind is not None and prm.positive == "success":
        from verl_turnkey.losses.objectives import objectives  # torch, which a bare installation lacks

        if (objective := objectives().get(prm.objective)) and "positive" in objective.reads:
            readers[f"turnkey.prm.objective={prm.objective}"] = f"turnkey.prm.positive {most}"
    source = None if teacher.source is None else read_source(teacher.source)[0]
    if source is not None and source.name in OF_GROUPS:
        readers[f"turnkey.teacher.source={source.name}"] = never
    elif teacher.source is not None and teacher.rows != "all":
        readers[f"turnkey.teacher.rows={teacher.rows}"] = never
    for reader, fix in readers.items():
        warn("success-by-score", reader=reader, loop=run.verls_loops[0], fix=fix)


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


def supplied_columns(run: CheckedRun) -> set[str]:
    """The columns that the trainer of this configuration supplies."""
    critic = bool(run.get("critic.enable"))
    heads = {f"extra.value_{head.name}" for head in heads_of(run.config, run.turnkey)} if critic else set()
    return from_trainer(run.turnkey.prm.kind, critic=critic) | heads


def check_columns(
    run: CheckedRun,
    env_columns: set[str] | None,
    reward_columns: Collection[str],
    strategy_columns: Collection[str] = (),
) -> None:
    """Refuse a column that a method reads and nothing provides, and one that has two sources.

    ``env_columns``: those that the probe saw in the environment's ``info["extra"]``; None without a valid step.
    ``reward_columns``, ``strategy_columns``: those that reward components and the rollout strategy add.
    """
    if env_columns is None:
        return
    if clash := sorted(env_columns & {*reward_columns}):
        refuse("reward-column-clash", message=column_clash(clash[0]))
    if clash := sorted(env_columns & {*strategy_columns}):
        refuse("strategy-column-clash", column=clash[0])
    method = run.estimator
    needs: list[tuple[str, Sequence[str]]] = [] if method is None else [(method.name, method.columns(run.params))]
    needs += [(f"{modifier.spec.name} (turnkey.credit.modify)", modifier.columns) for modifier in run.modifiers]
    of_format = STREAM_COLUMNS if run.turnkey.rollout.action_format == STREAM_FORMAT else ()
    names = (*env_columns, *reward_columns, *strategy_columns, *LOOPS_OWN, *of_format)
    columns = {f"extra.{name}" for name in names} | supplied_columns(run)
    for reader, needed in needs:
        if lacking := [column for column in needed if column.startswith("extra.") and column not in columns]:
            fix = how_to_set(lacking[0], run.columns_before)
            refuse("reward-column-missing", reader=reader, column=lacking[0], fix=fix)
    if run.get(BYPASS):
        for reader, needed in needs:
            check_supplied([reader], {*needed} - {f"extra.{name}" for name in (*env_columns, *reward_columns)})


def _check_verls(run: CheckedRun) -> None:
    loop, reward = min(run.loops), run.config.reward
    function = run.get(FUNCTION)
    if function and not any(entry.get("name") == "verl" for entry in run.turnkey.rewards):
        refuse("reward-function-uncalled", function=function, loop=loop)
    if reward.reward_model.enable:
        refuse("reward-model-uncalled", loop=loop)
    if url := run.get("reward.sandbox_fusion.url"):
        warn("sandbox-uncalled", url=url, loop=loop)
    if reward.reward_manager.name != "naive" or reward.reward_manager.source != "register":
        warn("reward-manager-uncalled", name=reward.reward_manager.name, loop=loop)
