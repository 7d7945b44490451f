"""Checks in the driver, before Ray starts and before any GPU is touched.

``main_ppo`` calls verl's ``validate_config`` in the driver; ours runs right before it. Every message names the key to
change.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage.paper_names import known_as
from verl_turnkey.plugins import register
from verl_turnkey.plugins.checks.agent import check_agent
from verl_turnkey.plugins.checks.agent_loop import check_agent_loop
from verl_turnkey.plugins.checks.algorithm import check_algorithm
from verl_turnkey.plugins.checks.branching import check_branching
from verl_turnkey.plugins.checks.checkpoints import check_checkpoints, check_resumed_data
from verl_turnkey.plugins.checks.combinations import warn_of_combinations
from verl_turnkey.plugins.checks.data import check_data, warn_of_shared
from verl_turnkey.plugins.checks.files import LOOP_COLUMN, training_loops
from verl_turnkey.plugins.checks.findings import Findings, collecting, refuse, warn
from verl_turnkey.plugins.checks.groups import check_groups
from verl_turnkey.plugins.checks.late import check_late
from verl_turnkey.plugins.checks.limits import check_counts, check_limits
from verl_turnkey.plugins.checks.lora import check_lora
from verl_turnkey.plugins.checks.mcp import check_mcp
from verl_turnkey.plugins.checks.panel import check_panel
from verl_turnkey.plugins.checks.paths import check_address, check_joining, check_log_folder, check_paths
from verl_turnkey.plugins.checks.prm import check_prm
from verl_turnkey.plugins.checks.resources import check_resources
from verl_turnkey.plugins.checks.rewards import (
    check_bounds,
    check_compared,
    check_rewards,
    check_success,
    supplied_columns,
)
from verl_turnkey.plugins.checks.rollout import agent_loops, check_rollout
from verl_turnkey.plugins.checks.rule_table import check_ignored
from verl_turnkey.plugins.checks.run import ESTIMATOR, MODE, OURS, N, Run, needs_name
from verl_turnkey.plugins.checks.selection import check_selection
from verl_turnkey.plugins.checks.teacher import check_hidden_rank, check_teacher
from verl_turnkey.plugins.checks.texts import check_skill
from verl_turnkey.plugins.checks.unknown_keys import check_accepted, check_unknown, dataclasses
from verl_turnkey.plugins.checks.unread import check_steps, check_unread
from verl_turnkey.plugins.checks.update import check_update, warn_ignored
from verl_turnkey.plugins.checks.value_heads import check_streams, check_value_heads
from verl_turnkey.plugins.checks.values import check_ranges
from verl_turnkey.plugins.config.cluster import joins_cluster
from verl_turnkey.plugins.config.command_line import groups, near_miss
from verl_turnkey.plugins.config.machine import visible_accelerator
from verl_turnkey.plugins.config.schema import TurnkeyConfig, closest, estimator_of, loss_of, turnkey_config
from verl_turnkey.plugins.credit.rows import DERIVED_COLUMNS, VERLS_LOOPS, listed_per_turn, needs_record
from verl_turnkey.plugins.credit.trainer_columns import BYPASS, check_supplied
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
    with collecting(config) as findings:
        findings.run(check_ignored, config)
        findings.run(_check_root_keys, config)
        if involved(config):
            findings.run(check_ranges, config, use_critic=use_critic)
        findings.run(turnkey_config, config)


def involved(config: DictConfig) -> bool:
    """Whether the launch line has a switch of ours: else stock verl runs, or another plugin."""
    return str(OmegaConf.select(config, MODE)).startswith("turnkey_") or "turnkey" in config


def _check(config: DictConfig, findings: Findings, *, use_critic: bool) -> None:
    switched, turnkey = involved(config), turnkey_config(config)
    check_selection(config, turnkey)
    if "verl.trainer.ppo.core_algos" in sys.modules:
        register.register_estimators()
        register.register_losses()
    # Another plugin may have registered the name: without a switch of ours the run belongs to that plugin.
    ours = estimator_of(config) is not None and (
        switched or ledger.owns("estimator", str(config.algorithm.adv_estimator))
    )
    if not (ours or switched) and loss_of(config) is None:
        return
    from verl.trainer.ppo.utils import need_reference_policy

    check, loops = findings.run, training_loops(config)
    run = Run(config, turnkey, loops, use_critic, bool(need_reference_policy(config)))
    if ours:
        check(_check_estimator, run)
    if warning := internals.unsupported_verl():
        warn("verl-version", warning)
    ledger.verify(("config",))
    if run.our_trainer:
        check(_check_trainer, run)
        check(_check_warm_up, run)
        for node in dataclasses(use_critic=use_critic, use_reference=run.use_reference):
            check(check_accepted, config, node)
        check(check_unknown, config)
        check(check_counts, config)
        check(check_rollout, run)
        check(check_joining, config)
        check(check_paths, run)
        check(check_lora, run)
        check(check_checkpoints, config, use_critic=use_critic)
        for check_run in (check_log_folder, check_algorithm, warn_of_combinations, check_unread, check_limits):
            check(check_run, run)
        check(check_late, run)
        check(check_resources, run)
    elif turnkey.log.trajectories:
        check(check_address, "turnkey.log.trajectories", turnkey.log.trajectories)
        problem = f"turnkey.log.trajectories will contain only rollouts: the trainer {run.mode} writes no credit"
        warn("log-without-credit", f"{problem}; set {MODE}=turnkey_{run.mode}")
    check(check_update, run)
    run = replace(run, files=check(check_data, config, turnkey, agent_loops(config)) or [])
    if run.files and OURS in loops:
        check(warn_of_shared, config)
        check(check_panel, config)
    if run.trains and run.files:
        check(check_resumed_data, config)
    check(check_steps, config)
    for check_run in (check_groups, check_skill, check_teacher, check_hidden_rank):
        check(check_run, run)
    for check_run in (check_value_heads, check_streams, check_prm, check_success):
        check(check_run, run)
    if not run.our_loops and turnkey.rewards != TurnkeyConfig().rewards:
        idle = f"turnkey.rewards has no effect with the agent loop {min(loops)}"
        warn("rewards-without-effect", f"{idle}: only {' and '.join(ledger.AGENT_LOOPS)} read it")
    reward_columns: tuple[str, ...] = ()
    if run.our_loops and (rewards := check(check_rewards, run)) is not None:
        check(check_compared, run, rewards)
        reward_columns = rewards.columns
    strategy_columns = check(check_branching, run, reward_columns) or ()
    if ours:
        check(_check_recorded, run)
    check(check_agent, run)
    check(check_mcp, run)
    if OURS in loops and not findings.errors:
        run = run if loops == {OURS} else replace(run, files=[])
        check_agent_loop(run, reward_columns, strategy_columns)
    _hint_without_gpu(config)


def _check_root_keys(config: DictConfig) -> None:
    """Refuse root keys such as ``turnkey/enviroment``, which Hydra makes of ``+turnkey/enviroment=x``."""
    for key in map(str, config):
        if near_miss(key.split("/")[0]) or key.startswith("turnkey/"):
            refuse("unknown-config-group", f"there is no config group {key!r}{closest(key, list(groups()))}")
    if isinstance(config.get("turnkey"), str):
        problem = f"turnkey={config.turnkey!r} is a plain value: the config group was not found"
        fix = "Write +turnkey=<method> (with the plus), and check that 'verl-turnkey ... is loaded' was printed"
        refuse("turnkey-plain-value", f"{problem}. {fix}")


def _check_estimator(run: Run) -> None:
    spec, config, params = run.estimator, run.config, run.params
    assert spec is not None
    if not run.our_trainer:
        problem = f"{ESTIMATOR}={spec.name} needs a trainer of this package, but {MODE} is {run.mode!r}"
        refuse("estimator-trainer", f"{problem}: set {MODE}=turnkey_{run.mode}, or add +turnkey={spec.name}")
    ledger.verify(("estimator",), (str(config.algorithm.adv_estimator),))
    for module in getattr(params, "requires", ()):
        if find_spec(module) is None:
            problem = f"{ESTIMATOR}={spec.name} needs the Python package {module!r}, which is not installed"
            refuse("method-package-missing", f'{problem}: pip install "verl-turnkey[{spec.name}]" on every node')
    # Both compare the episodes of a group.
    compares = hasattr(params, "norm") or getattr(params, "singleton", None) == "zero"
    if run.rollout.n == 1 and not run.trains_branches and compares:
        problem = f"{N}=1 leaves {spec.name} with one episode per group and nothing to compare it with"
        warn("single-rollout", f"{problem}: raise n, or take a method without groups (turn_gae, vc_gae, rebn)")
    if "value" in run.columns and not run.use_critic:
        refuse("critic-missing", f"{ESTIMATOR}={spec.name} needs a critic: set critic.enable=true")
    check_bounds(run)
    warn_ignored(config.algorithm, "algorithm", IGNORED_ALGORITHM_KEYS, spec, "turnkey.credit")


def _check_trainer(run: Run) -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    needs_name("unknown-turnkey-trainer", MODE, run.mode, ledger.TRAINERS)
    if not run.config.trainer.use_v1:
        refuse("trainer-v1", f"{MODE}={run.mode} is a V1 trainer: set trainer.use_v1=true")
    if run.config.algorithm.adv_estimator is None:
        fix = f"set {ESTIMATOR} to one of your own (turnkey.modules), of this package or of verl"
        refuse("estimator-missing", f"+turnkey=base chooses no estimator: {fix}")
    # verl would find out after the first rollout.
    elif (name := str(run.config.algorithm.adv_estimator)) not in ADV_ESTIMATOR_REGISTRY:
        instead = known_as(name) or closest(name, [*ADV_ESTIMATOR_REGISTRY])
        refuse("unknown-estimator", f"there is no {ESTIMATOR}={name!r}{instead}")


def _check_warm_up(run: Run) -> None:
    if not run.use_critic and (warm_up := run.config.trainer.get("critic_warmup") or 0) > 1:
        problem = f"trainer.critic_warmup={warm_up} trains no actor before step {warm_up}, and this run has no critic"
        refuse("critic-warmup-without-critic", f"{problem} to warm up: set it to 0")


def _check_recorded(run: Run) -> None:
    """Refuse batches that mix rows with and without records, and methods that need records where there are none."""
    if run.verls_loops and run.our_loops:
        refuse(
            "mixed-agent-loops",
            f"{run.setting(ESTIMATOR)} needs a record in all rows of a batch, or in none, but the data (column "
            f"{LOOP_COLUMN!r}) name {run.our_loops[0]}, whose rows have one, and {run.verls_loops[0]}, whose rows have "
            "none: train the rows of each in a run of their own",
        )
    for loop in run.verls_loops:
        _check_derived(run, loop)


def _check_derived(run: Run, loop: str) -> None:
    """Refuse a method that needs columns which rows of verl's loops, without a record, do not provide."""
    spec, needed = run.estimator, run.columns
    assert spec is not None
    per_turn = {f"extra.{name}" for name in listed_per_turn(run.rollout) if name in VERLS_LOOPS[loop]}
    lacking = [column for column in needed if column not in {*DERIVED_COLUMNS, *supplied_columns(run), *per_turn}]
    if lacking:
        from_data = loop != run.rollout.agent.default_agent_loop
        cause = f"the agent loop is {loop}, by the data's column {LOOP_COLUMN!r}, which overrides default_agent_loop: "
        refuse("columns-without-record", (cause if from_data else "") + needs_record(spec.name, lacking))
    if run.get(BYPASS):
        names = [spec.name, *(modification.spec.name for modification in run.modifiers)]
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
