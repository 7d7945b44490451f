"""Checks in the driver, before Ray starts and before any GPU is touched.

``main_ppo`` calls verl's ``validate_config`` in the driver; ours runs right before it. Every message names the key to
change.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage.paper_names import known_as
from verl_turnkey.plugins import registries
from verl_turnkey.plugins.checks.agent import check_agent
from verl_turnkey.plugins.checks.agent_loop import check_agent_loop
from verl_turnkey.plugins.checks.algorithm import check_algorithm
from verl_turnkey.plugins.checks.branching import check_branching
from verl_turnkey.plugins.checks.checkpoints import check_checkpoints
from verl_turnkey.plugins.checks.combinations import warn_of_combinations
from verl_turnkey.plugins.checks.data import check_data, warn_of_shared
from verl_turnkey.plugins.checks.files import LOOP_COLUMN, training_loops
from verl_turnkey.plugins.checks.findings import Findings, collecting, refuse, warn
from verl_turnkey.plugins.checks.groups import check_groups
from verl_turnkey.plugins.checks.hidden_rank import check_hidden_rank
from verl_turnkey.plugins.checks.late import check_late
from verl_turnkey.plugins.checks.limits import check_counts, check_limits
from verl_turnkey.plugins.checks.lora import check_lora
from verl_turnkey.plugins.checks.mcp import check_mcp
from verl_turnkey.plugins.checks.panel import check_panel
from verl_turnkey.plugins.checks.paths import check_address, check_joining, check_log_folder, check_paths
from verl_turnkey.plugins.checks.prm import check_prm
from verl_turnkey.plugins.checks.resources import check_resources
from verl_turnkey.plugins.checks.rewards import check_bounds, check_compared, check_rewards, supplied_columns
from verl_turnkey.plugins.checks.rollout import agent_loops, check_rollout
from verl_turnkey.plugins.checks.rule_table import check_ignored
from verl_turnkey.plugins.checks.selection import check_selection
from verl_turnkey.plugins.checks.skill import check_skill
from verl_turnkey.plugins.checks.teacher import check_teacher
from verl_turnkey.plugins.checks.unknown_keys import check_accepted, check_unknown, dataclasses
from verl_turnkey.plugins.checks.unread import check_steps, check_unread
from verl_turnkey.plugins.checks.update import check_update, warn_ignored
from verl_turnkey.plugins.checks.value_heads import check_streams, check_value_heads
from verl_turnkey.plugins.checks.values import check_ranges
from verl_turnkey.plugins.config.cluster import joins_cluster
from verl_turnkey.plugins.config.command_line import groups, near_miss
from verl_turnkey.plugins.config.machine import visible_accelerator
from verl_turnkey.plugins.config.schema import (
    TurnkeyConfig,
    closest,
    credit_modify,
    credit_params,
    estimator_of,
    loss_of,
    turnkey_config,
)
from verl_turnkey.plugins.credit.supplied import BYPASS, check_supplied
from verl_turnkey.plugins.credit.unrecorded import COLUMNS, VERLS_LOOPS, listed_per_turn, needs_record
from verl_turnkey.plugins.rollout.strategies import read_strategy
from verl_turnkey.plugins.verl_api import internals, ledger

# verl's keys that a turnkey estimator does not read: their defaults, and the parameter of ours that means the same.
IGNORED_ALGORITHM_KEYS = {"gamma": (1.0, "gamma"), "lam": (1.0, "lam"), "norm_adv_by_std_in_grpo": (True, "norm")}


def check(config: DictConfig, *, use_critic: bool) -> None:
    """Refuse a configuration that cannot work; one that does not use this package is not checked.

    Later checks rely on earlier ones: names, then paths, sizes and data files, then the first task, which is played.
    None of them writes to the configuration.

    Args:
        config: with its values checked (:func:`check_values`), and the writes of ``config/resolve.py`` made.
        use_critic: whether the run trains a critic.

    Raises:
        ConfigError: says what was expected, what came and which key to change; lists every error if there are several.
    """
    with collecting(config) as findings:
        _check(config, findings, use_critic=use_critic)


def check_values(config: DictConfig, *, use_critic: bool) -> None:
    """Refuse values that no other check can compute with.

    Raises:
        ConfigError: one line per key.
    """
    check_ignored(config)
    _check_root_keys(config)
    if involved(config):
        check_ranges(config, use_critic=use_critic)
    turnkey_config(config)


def involved(config: DictConfig) -> bool:
    """Whether the launch line has a switch of ours: else stock verl runs, or another plugin."""
    return _mode(config).startswith("turnkey_") or "turnkey" in config


def _mode(config: DictConfig) -> str:
    return str(OmegaConf.select(config, "trainer.v1.trainer_mode"))


def _check(config: DictConfig, findings: Findings, *, use_critic: bool) -> None:
    mode, switched = _mode(config), involved(config)
    turnkey = turnkey_config(config)
    check_selection(config, turnkey)
    if "verl.trainer.ppo.core_algos" in sys.modules:
        registries.register_estimators()
        registries.register_losses()
    # Another plugin may have registered the name: without a switch of ours the run belongs to that plugin.
    ours = estimator_of(config) is not None and (
        switched or ledger.owns("estimator", str(config.algorithm.adv_estimator))
    )
    if not (ours or switched) and loss_of(config) is None:
        return
    run = findings.run
    if ours:
        run(_check_estimator, config, turnkey, use_critic, mode)
    if warning := internals.unsupported_verl():
        warn("verl-version", warning)
    ledger.verify(("config",))
    loops = training_loops(config)
    if mode.startswith("turnkey_"):
        from verl.trainer.ppo.utils import need_reference_policy

        _check_trainer(config, mode)
        run(_check_warm_up, config, use_critic)
        reference = need_reference_policy(config)
        for node in dataclasses(use_critic=use_critic, use_reference=reference):
            run(check_accepted, config, node)
        run(check_unknown, config)
        run(check_counts, config)
        run(check_rollout, config, turnkey, mode, loops)
        run(check_joining, config)
        run(check_paths, config, turnkey, use_critic=use_critic)
        run(check_lora, config, mode, use_critic=use_critic)
        run(check_checkpoints, config, use_critic=use_critic)
        run(check_log_folder, config, turnkey)
        run(check_algorithm, config, turnkey, loops)
        run(warn_of_combinations, config, turnkey, loops)
        run(check_unread, config, loops, use_critic=use_critic)
        run(check_limits, config, turnkey, loops, use_critic=use_critic, use_reference=reference)
        run(check_late, config, turnkey, loops, use_critic=use_critic)
        run(check_resources, config, use_critic=use_critic)
    elif turnkey.log.trajectories:
        run(check_address, "turnkey.log.trajectories", turnkey.log.trajectories)
        warn(
            "log-without-credit",
            f"turnkey.log.trajectories will contain only rollouts, including those of validation: the trainer {mode} "
            f"writes no credit; set trainer.v1.trainer_mode=turnkey_{mode}",
        )
    run(check_update, config, turnkey, mode, loops, use_critic=use_critic)
    files = run(check_data, config, turnkey, agent_loops(config)) or []
    if files and "turnkey_env" in loops:
        run(warn_of_shared, config)
        run(check_panel, config)
    run(check_steps, config)
    run(check_groups, config, turnkey, mode, files, loops)
    run(check_skill, turnkey, files, loops)
    run(check_teacher, config, turnkey, mode, files, loops)
    run(check_hidden_rank, config, turnkey)
    run(check_value_heads, config, turnkey, use_critic=use_critic)
    run(check_streams, config, turnkey)
    run(check_prm, config, turnkey, mode, loops)
    our_loops = {*ledger.AGENT_LOOPS} & loops
    if not our_loops and turnkey.rewards != TurnkeyConfig().rewards:
        warn(
            "rewards-without-effect",
            f"turnkey.rewards has no effect with the agent loop {min(loops)}: "
            f"only {' and '.join(ledger.AGENT_LOOPS)} read it",
        )
    reward_columns: tuple[str, ...] = ()
    if our_loops and (rewards := run(check_rewards, config, turnkey, loops)) is not None:
        run(check_compared, config, turnkey, rewards)
        reward_columns = rewards.columns
    strategy_columns = run(check_branching, config, turnkey, reward_columns, loops) or ()
    if ours:
        run(_check_recorded, config, turnkey, loops)
    run(check_agent, config, turnkey, loops)
    run(check_mcp, turnkey, loops)
    if "turnkey_env" in loops and not findings.errors:
        check_agent_loop(config, turnkey, files if loops == {"turnkey_env"} else [], reward_columns, strategy_columns)
    _hint_without_gpu(config)


def _check_root_keys(config: DictConfig) -> None:
    """Refuse root keys such as ``turnkey/enviroment``, which Hydra makes of ``+turnkey/enviroment=x``."""
    for key in map(str, config):
        if near_miss(key.split("/")[0]) or key.startswith("turnkey/"):
            refuse("unknown-config-group", f"there is no config group {key!r}{closest(key, list(groups()))}")
    if isinstance(config.get("turnkey"), str):
        refuse(
            "turnkey-plain-value",
            f"turnkey={config.turnkey!r} is a plain value: the config group was not found. Write +turnkey=<method> "
            "(with the plus), and check that the line 'verl-turnkey ... is loaded' was printed",
        )


def _check_estimator(config: DictConfig, turnkey: TurnkeyConfig, use_critic: bool, mode: str) -> None:
    spec = estimator_of(config)
    assert spec is not None
    if not mode.startswith("turnkey_"):
        refuse(
            "estimator-trainer",
            f"algorithm.adv_estimator={spec.name} needs a trainer that hands over the steps of each episode, but "
            f"trainer.v1.trainer_mode is {mode!r}: set trainer.v1.trainer_mode=turnkey_{mode}, or add "
            f"+turnkey={spec.name}",
        )
    ledger.verify(("estimator",), (str(config.algorithm.adv_estimator),))
    params = credit_params(config, turnkey)
    modify = credit_modify(config, turnkey)
    needed = spec.columns(params, modify)
    for module in getattr(params, "requires", ()):
        if find_spec(module) is None:
            refuse(
                "method-package-missing",
                f"algorithm.adv_estimator={spec.name} needs the Python package {module!r}, which is not installed: "
                f'pip install "verl-turnkey[{spec.name}]" on every node',
            )
    forked = read_strategy(turnkey.rollout.strategy)
    if (
        config.actor_rollout_ref.rollout.n == 1
        and not (forked and forked[0].trains)
        and (
            hasattr(params, "norm")
            or getattr(params, "singleton", None) == "zero"  # both compare the episodes of a group
        )
    ):
        warn(
            "single-rollout",
            f"actor_rollout_ref.rollout.n=1 leaves {spec.name} with one episode per group and nothing to compare it "
            "with: raise n, or take a method without groups (turn_gae, vc_gae, rebn)",
        )
    if "value" in needed and not use_critic:
        refuse("critic-missing", f"algorithm.adv_estimator={spec.name} needs a critic: set critic.enable=true")
    check_bounds([spec, *(modifier.spec for modifier in modify)], config, turnkey)
    warn_ignored(config.algorithm, "algorithm", IGNORED_ALGORITHM_KEYS, spec, "turnkey.credit")


def _check_trainer(config: DictConfig, mode: str) -> None:
    if mode not in ledger.TRAINERS:
        refuse(
            "unknown-turnkey-trainer",
            f"there is no trainer.v1.trainer_mode={mode!r}{closest(mode, list(ledger.TRAINERS))}",
        )
    if not config.trainer.use_v1:
        refuse("trainer-v1", f"trainer.v1.trainer_mode={mode} is a V1 trainer: set trainer.use_v1=true")
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    if config.algorithm.adv_estimator is None:
        refuse(
            "estimator-missing",
            "+turnkey=base chooses no estimator: set algorithm.adv_estimator to one of your own (turnkey.modules), of "
            "this package or of verl",
        )
    name = str(config.algorithm.adv_estimator)
    if name not in ADV_ESTIMATOR_REGISTRY:  # verl would find out after the first rollout
        refuse(
            "unknown-estimator",
            f"there is no algorithm.adv_estimator={name!r}{known_as(name) or closest(name, [*ADV_ESTIMATOR_REGISTRY])}",
        )


def _check_warm_up(config: DictConfig, use_critic: bool) -> None:
    if not use_critic and (warm_up := config.trainer.get("critic_warmup") or 0) > 1:
        refuse(
            "critic-warmup-without-critic",
            f"trainer.critic_warmup={warm_up} leaves the actor as it is before step {warm_up}, and this run has no "
            "critic to warm up: set it to 0",
        )


def _check_recorded(config: DictConfig, turnkey: TurnkeyConfig, loops: Collection[str]) -> None:
    """Refuse batches that mix rows with and without records, and methods that need records where there are none."""
    without = sorted({*loops} & {*VERLS_LOOPS})
    if without and (ours := {*ledger.AGENT_LOOPS} & {*loops}):
        refuse(
            "mixed-agent-loops",
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} needs a record in all rows of a batch, or in "
            f"none, but the training data (column {LOOP_COLUMN!r}) name the agent loop {min(ours)}, which writes "
            f"one, and {without[0]}, which writes none: train the rows of each in a run of their own",
        )
    for loop in without:
        _check_derived(config, turnkey, loop)


def _check_derived(config: DictConfig, turnkey: TurnkeyConfig, loop: str) -> None:
    """Refuse a method that needs columns which rows of verl's loops, without a record, do not provide."""
    spec = estimator_of(config)
    assert spec is not None
    per_turn = {
        f"extra.{name}" for name in listed_per_turn(config.actor_rollout_ref.rollout) if name in VERLS_LOOPS[loop]
    }
    modify = credit_modify(config, turnkey)
    needed = spec.columns(credit_params(config, turnkey), modify)
    lacking = [column for column in needed if column not in {*COLUMNS, *supplied_columns(config, turnkey), *per_turn}]
    if lacking:
        from_data = loop != config.actor_rollout_ref.rollout.agent.default_agent_loop
        cause = f"the agent loop is {loop}, by the data's column {LOOP_COLUMN!r}, which overrides default_agent_loop: "
        refuse("columns-without-record", (cause if from_data else "") + needs_record(spec.name, lacking))
    if OmegaConf.select(config, BYPASS):
        names = [spec.name, *(modifier.spec.name for modifier in modify)]
        check_supplied(names, [column for column in needed if column not in per_turn])


def _hint_without_gpu(config: DictConfig) -> None:
    """Hint at the CPU mode: verl's error comes late and names Ray resources. A cluster's head node may have no GPU."""
    from verl_turnkey.plugins import cpu

    if not visible_accelerator() and not joins_cluster(config) and not cpu.opted_in():
        print(
            "verl-turnkey: no accelerator is visible here. On a machine without one add +turnkey/device=cpu; "
            "on the head node of a GPU cluster this line can be ignored.",
            file=sys.stderr,
            flush=True,
        )
