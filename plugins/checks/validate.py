"""Checks in the driver, before Ray starts and before any GPU is touched.

``main_ppo`` calls verl's ``validate_config`` in the driver; ours runs right before it. Every message names the key to
change.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins import registries
from verl_turnkey.plugins.checks.agent_loop import check_agent, check_agent_loop, check_mcp
from verl_turnkey.plugins.checks.algorithm import (
    check_algorithm,
    check_estimator,
    check_recorded,
    check_streams,
    check_trainer,
    check_value_heads,
    check_warm_up,
    warn_of_combinations,
)
from verl_turnkey.plugins.checks.checkpoints import check_checkpoints, check_resumed_data, check_steps
from verl_turnkey.plugins.checks.data import check_data, check_panel, check_skill, warn_of_shared
from verl_turnkey.plugins.checks.files import training_loops
from verl_turnkey.plugins.checks.findings import Findings, collecting, warn
from verl_turnkey.plugins.checks.groups import check_groups
from verl_turnkey.plugins.checks.keys import (
    check_accepted,
    check_root_keys,
    check_selection,
    check_unknown,
    check_unread,
    dataclasses,
)
from verl_turnkey.plugins.checks.limits import check_counts, check_late, check_limits
from verl_turnkey.plugins.checks.resources import (
    check_address,
    check_joining,
    check_log_folder,
    check_lora,
    check_paths,
    check_resources,
    hint_without_gpu,
)
from verl_turnkey.plugins.checks.rewards import (
    check_compared,
    check_rewards,
    check_success,
)
from verl_turnkey.plugins.checks.rollout import agent_loops, check_branching, check_rollout
from verl_turnkey.plugins.checks.rules import check_ignored
from verl_turnkey.plugins.checks.run import MODE, OURS, Run
from verl_turnkey.plugins.checks.scorers import check_hidden_rank, check_prm, check_teacher
from verl_turnkey.plugins.checks.update import check_update
from verl_turnkey.plugins.checks.values import check_ranges
from verl_turnkey.plugins.config.schema import TurnkeyConfig, estimator_of, loss_of, turnkey_config
from verl_turnkey.plugins.verl_api import internals, ledger


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
        findings.run(check_root_keys, config)
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
        registries.register_estimators()
        registries.register_losses()
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
        check(check_estimator, run)
    if warning := internals.unsupported_verl():
        warn("verl-version", warning=warning)
    ledger.verify(("config",))
    if run.our_trainer:
        check(check_trainer, run)
        check(check_warm_up, run)
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
        warn("log-without-credit", mode=run.mode)
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
        warn("rewards-without-effect", loop=min(loops), ours=" and ".join(ledger.AGENT_LOOPS))
    reward_columns: tuple[str, ...] = ()
    if run.our_loops and (rewards := check(check_rewards, run)) is not None:
        check(check_compared, run, rewards)
        reward_columns = rewards.columns
    strategy_columns = check(check_branching, run, reward_columns) or ()
    if ours:
        check(check_recorded, run)
    check(check_agent, run)
    check(check_mcp, run)
    if OURS in loops and not findings.errors:
        run = run if loops == {OURS} else replace(run, files=[])
        check_agent_loop(run, reward_columns, strategy_columns)
    hint_without_gpu(config)
