"""Checks of what the steps of an episode are paid, in the driver."""

from __future__ import annotations

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.rewards import compose
from verl_turnkey.plugins.config import TurnkeyConfig


def check_rewards(turnkey: TurnkeyConfig) -> None:
    """Compose the reward components, and refuse an invalid action that is counted twice.

    Raises:
        ConfigError: names the key to change.
    """
    compose(turnkey.rewards)
    penalty = turnkey.rollout.invalid_action_penalty
    for i, entry in enumerate(turnkey.rewards):
        if entry["name"] == "invalid" and entry["weight"] and penalty:
            raise ConfigError(
                f"turnkey.rewards[{i}] (invalid, weight {entry['weight']}) and "
                f"turnkey.rollout.invalid_action_penalty={penalty} would count an invalid action twice: set "
                "turnkey.rollout.invalid_action_penalty=0, or leave the component out"
            )
