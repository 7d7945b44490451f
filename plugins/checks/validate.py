"""Checks in the driver, before Ray starts and before any GPU is touched.

``main_ppo`` calls verl's ``validate_config`` in the driver; ours runs right before it. Every message names the key to
change.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from verl_turnkey.plugins import register
from verl_turnkey.plugins.checks import (
    agent_loop,
    algorithm,
    checkpoints,
    data,
    groups,
    keys,
    limits,
    memory,
    resources,
    rewards,
    rollout,
    rules,
    scorers,
    update,
    values,
)
from verl_turnkey.plugins.checks.files import training_loops
from verl_turnkey.plugins.checks.findings import Findings, collecting, warn
from verl_turnkey.plugins.checks.run import MODE, OURS, CheckedRun
from verl_turnkey.plugins.config.schema import TurnkeyConfig, check_parameters, estimator_of, loss_of, turnkey_config
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
        findings.run(rules.check_ignored, config)
        findings.run(keys.check_root_keys, config)
        if involved(config):
            findings.run(values.check_ranges, config, use_critic=use_critic)
        findings.run(turnkey_config, config)
        findings.run(check_parameters, config, "credit")
        findings.run(check_parameters, config, "loss")


def involved(config: DictConfig) -> bool:
    """Whether the launch line has a switch of ours: else stock verl runs, or another plugin."""
    return str(OmegaConf.select(config, MODE)).startswith("turnkey_") or "turnkey" in config


def _check(config: DictConfig, findings: Findings, *, use_critic: bool) -> None:
    switched, turnkey = involved(config), turnkey_config(config)
    keys.check_selection(config, turnkey)
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
    run = CheckedRun(config, turnkey, loops, use_critic, bool(need_reference_policy(config)))
    if ours:
        check(algorithm.check_estimator, run)
    if warning := internals.unsupported_verl():
        warn("verl-version", warning=warning)
    ledger.verify(("config",))
    if run.our_trainer:
        check(algorithm.check_trainer, run)
        check(algorithm.check_warm_up, run)
        for node in keys.dataclasses(use_critic=use_critic, use_reference=run.use_reference):
            check(keys.check_accepted, config, node)
        check(keys.check_unknown, config)
        check(limits.check_counts, config)
        check(rollout.check_rollout, run)
        check(resources.check_joining, config)
        check(resources.check_paths, run)
        check(resources.check_sockets, config)
        check(resources.check_lora, run)
        check(checkpoints.check_checkpoints, config, use_critic=use_critic)
        check(resources.check_log_folder, run)
        check(algorithm.check_algorithm, run)
        check(algorithm.warn_of_combinations, run)
        check(keys.check_unread, run)
        check(limits.check_limits, run)
        check(limits.check_late, run)
        check(resources.check_resources, run)
        if not findings.errors:  # it uses the settings that may be wrong
            check(memory.check_memory, run)
    elif turnkey.log.trajectories:
        check(resources.check_address, "turnkey.log.trajectories", turnkey.log.trajectories)
        warn("log-without-credit", mode=run.mode)
    check(resources.check_otlp, run)
    check(resources.check_servers, run)
    check(update.check_update, run)
    run = replace(run, files=check(data.check_data, config, turnkey, rollout.agent_loops(config)) or [])
    if run.files and OURS in loops:
        check(data.warn_of_shared, config)
        check(data.check_panel, config)
    if run.trains and run.files:
        check(checkpoints.check_resumed_data, config)
    check(checkpoints.check_steps, config)
    if run.our_trainer and not findings.errors:
        check(checkpoints.check_disk, run)
    for check_run in (groups.check_groups, data.check_skill, scorers.check_teacher, scorers.check_hidden_rank):
        check(check_run, run)
    for check_run in (algorithm.check_value_heads, algorithm.check_streams, scorers.check_prm, rewards.check_success):
        check(check_run, run)
    if not run.our_loops and turnkey.rewards != TurnkeyConfig().rewards:
        warn("rewards-without-effect", loop=min(loops), ours=" and ".join(ledger.AGENT_LOOPS))
    reward_columns: tuple[str, ...] = ()
    if run.our_loops and (composition := check(rewards.check_rewards, run)) is not None:
        check(rewards.check_compared, run, composition)
        reward_columns = composition.columns
    strategy_columns = check(rollout.check_branching, run, reward_columns) or ()
    if ours:
        check(algorithm.check_recorded, run)
    check(agent_loop.check_agent, run)
    check(agent_loop.check_mcp, run)
    check(agent_loop.check_opponents, run)
    if OURS in loops and not findings.errors:
        run = run if loops == {OURS} else replace(run, files=[])
        agent_loop.check_agent_loop(run, reward_columns, strategy_columns)
    resources.hint_without_gpu(config)
