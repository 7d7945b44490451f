"""Checks in the driver of the strategy by which episodes fork."""

from __future__ import annotations

import warnings

from omegaconf import DictConfig

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.config.schema import TurnkeyConfig, credit_modify, credit_params, estimator_of
from verl_turnkey.plugins.rollout.strategies import BRANCH_COLUMNS, KEY, read_strategy


def check_branching(config: DictConfig, turnkey: TurnkeyConfig, given: tuple[str, ...]) -> tuple[str, ...]:
    """Refuse a strategy that cannot do what it asks for; warn of one that measures what nothing reads.

    ``given``: the columns that reward components give. Whether the environment can be cloned is the probe's to find.

    Returns:
        The columns that the strategy gives; none for independent episodes.

    Raises:
        ConfigError: names the key to change.
    """
    found = read_strategy(turnkey.rollout.strategy)
    if found is None:
        return ()
    spec, options = found[0], turnkey.rollout
    rollout = config.actor_rollout_ref.rollout
    asked = f"{KEY}={spec.name}"
    if (loop := str(rollout.agent.default_agent_loop)) != "turnkey_env":
        raise ConfigError(f"{asked} has no effect with the agent loop {loop}: only turnkey_env forks episodes")
    if rollout.get("full_determinism", False):
        raise ConfigError(
            f"{asked} asks the server several times at once under one request id, which "
            "actor_rollout_ref.rollout.full_determinism=true hands to vLLM: set it to false"
        )
    method = estimator_of(config)
    if method is None:
        raise ConfigError(
            f"{asked} gives columns and branches, which verl's "
            f"algorithm.adv_estimator={config.algorithm.adv_estimator} does not read: it knows one score per rollout. "
            "Take a method of this package, or of your own"
        )
    turn = options.max_tokens_per_turn or rollout.response_length
    if options.branch_tokens is not None and options.branch_tokens < turn:
        raise ConfigError(
            f"turnkey.rollout.branch_tokens={options.branch_tokens} allows no branch: one turn may take {turn} tokens "
            "(turnkey.rollout.max_tokens_per_turn, or data.max_response_length)"
        )
    columns = (*BRANCH_COLUMNS, *spec.gives)
    if clash := sorted({*columns} & {*given}):
        raise ConfigError(
            f"{asked} gives the column {clash[0]}, and so does a component of turnkey.rewards: give that another column"
        )
    read = {*method.columns(credit_params(config, turnkey), credit_modify(config, turnkey)), *method.before}
    if spec.gives and not {f"extra.{name}" for name in spec.gives} & read:
        warnings.warn(
            f"{asked} measures {', '.join(spec.gives)}, and the method {method.name} reads none of it", stacklevel=2
        )
    return columns
