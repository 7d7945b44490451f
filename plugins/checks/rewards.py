"""Checks of rewards: components, columns, verl's reward functions, distillation."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from verl_turnkey.advantage import EstimatorSpec, ModifierSpec
from verl_turnkey.advantage.registry import how_to_set
from verl_turnkey.envs.rewards import LOOPS_OWN, Composition, column_clash, compose, rewards
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.checks.run import KL, N, Run, needs_off
from verl_turnkey.plugins.checks.teacher import OF_GROUPS
from verl_turnkey.plugins.checks.value_heads import heads_of
from verl_turnkey.plugins.checks.values import is_number
from verl_turnkey.plugins.config.schema import reward_entries
from verl_turnkey.plugins.credit.trainer_columns import BYPASS, check_supplied, from_trainer
from verl_turnkey.plugins.rollout.strategies import INDEPENDENT, KEY
from verl_turnkey.plugins.rollout.streams import COLUMNS, FORMAT
from verl_turnkey.plugins.teacher import read_source
from verl_turnkey.plugins.verl_api.ledger import AGENT_LOOPS

FUNCTION = "reward.custom_reward_function.path"
PENALTY = "turnkey.rollout.invalid_action_penalty"


def check_rewards(run: Run) -> Composition:
    """Compose ``turnkey.rewards``, and refuse settings that our agent loops would ignore or count twice.

    verl's reward functions score only rows without a score, which other agent loops write.
    """
    turnkey, method = run.turnkey, run.estimator
    if {*run.loops} <= {*AGENT_LOOPS}:
        _check_verls(run)
    teacher = "distillation.enabled=true gives the teacher's log-probabilities only for an episode's last row"
    needs_off(
        "distillation-agent-loop", run, "distillation.enabled", f"{teacher}, and turnkey_env writes a row per step"
    )
    composition = compose(reward_entries(run.config, turnkey))
    late = {name for name, reward in rewards().items() if reward.hindsight}
    for i, entry in enumerate(turnkey.rewards):
        if entry["name"] in late and (column := entry.get("column")) in run.columns_before:
            refuse(
                "reward-of-outcome-as-state",
                f"turnkey.rewards[{i}] ({entry['name']}, column: {column}) rates a step by its outcome, but {column} "
                "describes the state before the step: add it by a component of your own, which sees that state, or in "
                "the environment's info['extra']",
            )
    penalty = 0.0 if method is None else turnkey.rollout.invalid_action_penalty  # verl's estimators never see it
    for i, entry in enumerate(turnkey.rewards):
        pays = entry.get("column") is None and entry.get("weight")  # a column is not part of the reward
        if entry["name"] == "invalid" and pays and penalty:
            both = f"turnkey.rewards[{i}] (invalid, weight {entry['weight']}) and {PENALTY}={penalty}"
            problem = f"{both} would count an invalid action twice"
            refuse("invalid-counted-twice", f"{problem}: set {PENALTY}=0, or leave the component out")
    return composition


def check_compared(run: Run, composition: Composition) -> None:
    """Refuse a component that compares a task's rollouts if training plays only one, or if some are branches."""
    component = composition.compares
    if component is None:
        return
    if run.rollout.n < 2:
        problem = f"{component} compares the rollouts of a task with each other"
        refuse("compared-single-rollout", f"{problem}: set {N} to 2 or more, got {run.rollout.n}")
    if run.strategy and run.strategy.clones:
        problem = f"{component} compares the rollouts of a task, and {KEY}={run.strategy.name} plays branches of them"
        fix = f"set {KEY} to {INDEPENDENT}, or to one that only queries the model (probe, probe_gold)"
        refuse("compared-branching", f"{problem}, which it does not reward: {fix}")


def check_bounds(run: Run) -> None:
    """Refuse KL or a model's scores in the reward for methods that expect outcomes within bounds."""
    specs: list[EstimatorSpec | ModifierSpec] = [modification.spec for modification in run.modifiers]
    specs = [run.estimator, *specs] if run.estimator else specs
    bounded, kl = [spec.name for spec in specs if spec.bounded_outcomes], run.config.algorithm.use_kl_in_reward
    if bounded and kl:
        problem = f"{KL}=true moves outcomes out of the bounds that {bounded[0]} expects"
        fix = "set it to false, and actor_rollout_ref.actor.use_kl_loss=true for a KL penalty"
        refuse("bounded-kl-in-reward", f"{problem}: {fix}")
    prm = run.turnkey.prm
    if bounded and prm.kind is not None and prm.use != "column":
        problem = f"turnkey.prm.use={prm.use} moves outcomes out of the bounds that {bounded[0]} expects"
        fix = "set turnkey.prm.use=column, or take a method without bounds, such as +turnkey=grpo_steps"
        refuse("bounded-prm", f"{problem}: {fix}")
    costs = {str(entry.get("name")): reason for entry in run.turnkey.rewards if (reason := _below_zero(entry))}
    if bounded and costs:
        name, reason = next(iter(costs.items()))
        problem = f"turnkey.rewards: {name} {reason}, and {bounded[0]} expects no outcome below 0"
        warn("bounded-negative-outcome", problem)
    noisy = [f"turnkey.rewards ({name})" for name in costs if name != "outcome"]  # which is equal for all failures
    noisy = [f"{KL}=true", *noisy] if kl else noisy
    if noisy and "mc_grpo" in [spec.name for spec in specs]:
        warn(
            "noisy-outcomes",
            f"{noisy[0]} makes equal outcomes differ a little, and mc_grpo multiplies by a count of the outcomes that "
            "differ from the median: its credit shrinks by up to the size of the group",
        )


def check_success(run: Run) -> None:
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
        from verl_turnkey.learned import objectives  # torch, which a bare installation lacks

        if (objective := objectives().get(prm.objective)) and "positive" in objective.reads:
            readers[f"turnkey.prm.objective={prm.objective}"] = f"turnkey.prm.positive {most}"
    source = None if teacher.source is None else read_source(teacher.source)[0]
    if source is not None and source.name in OF_GROUPS:
        readers[f"turnkey.teacher.source={source.name}"] = never
    elif teacher.source is not None and teacher.rows != "all":
        readers[f"turnkey.teacher.rows={teacher.rows}"] = never
    for reader, fix in readers.items():
        problem = f"{reader} counts every score above 0 as a success, as rows of {run.verls_loops[0]} have no flag"
        warn("success-by-score", f"{problem}: set {fix}")


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


def supplied_columns(run: Run) -> set[str]:
    """The columns that the trainer of this configuration supplies."""
    critic = bool(run.get("critic.enable"))
    heads = {f"extra.value_{head.name}" for head in heads_of(run.config, run.turnkey)} if critic else set()
    return from_trainer(run.turnkey.prm.kind, critic=critic) | heads


def check_columns(
    run: Run,
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
        refuse("reward-column-clash", f"turnkey.rewards: {column_clash(clash[0])}")
    if clash := sorted(env_columns & {*strategy_columns}):
        problem = f"{KEY} adds the column {clash[0]}, and so does the environment in info['extra']"
        refuse("strategy-column-clash", f"{problem}: drop it there, or set {KEY}=independent")
    method = run.estimator
    needs: list[tuple[str, Sequence[str]]] = [] if method is None else [(method.name, method.columns(run.params))]
    needs += [(f"{modifier.spec.name} (turnkey.credit.modify)", modifier.columns) for modifier in run.modifiers]
    of_format = COLUMNS if run.turnkey.rollout.action_format == FORMAT else ()
    known = {f"extra.{name}" for name in (*env_columns, *reward_columns, *strategy_columns, *LOOPS_OWN, *of_format)}
    known |= supplied_columns(run)
    for reader, needed in needs:
        if lacking := [column for column in needed if column.startswith("extra.") and column not in known]:
            problem = f"{reader} needs the column {lacking[0]!r}, which the first task's environment does not give"
            fix = how_to_set(lacking[0], run.columns_before)
            refuse("reward-column-missing", f"{problem}: {fix}")
    if run.get(BYPASS):
        for reader, needed in needs:
            check_supplied([reader], {*needed} - {f"extra.{name}" for name in (*env_columns, *reward_columns)})


def _check_verls(run: Run) -> None:
    loop, reward = min(run.loops), run.config.reward
    function = run.get(FUNCTION)
    if function and not any(entry.get("name") == "verl" for entry in run.turnkey.rewards):
        problem = f"{FUNCTION}={function} is not called: the rewards of the agent loop {loop} are turnkey.rewards"
        refuse(
            "reward-function-uncalled", f"{problem}. Add 'turnkey.rewards=[{{name: step}},{{name: verl}}]', or drop it"
        )
    instead = f"has no effect with the agent loop {loop}, whose rewards are turnkey.rewards"
    if reward.reward_model.enable:
        judge = "ask the model with the component judge (turnkey.rewards=[{name: judge, url: ..., model: ...}])"
        refuse("reward-model-uncalled", f"reward.reward_model.enable=true {instead}: set it to false and {judge}")
    if url := run.get("reward.sandbox_fusion.url"):
        warn("sandbox-uncalled", f"reward.sandbox_fusion.url={url} {instead}")
    if reward.reward_manager.name != "naive" or reward.reward_manager.source != "register":
        warn("reward-manager-uncalled", f"reward.reward_manager.name={reward.reward_manager.name} {instead}")
