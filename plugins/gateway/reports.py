"""What an agent posts beside its calls of the model: rewards, and the keys of its states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verl_turnkey.envs.answers import finite_reward
from verl_turnkey.envs.base import digest
from verl_turnkey.plugins.gateway.messages import GatewayError

LONGEST_KEY = 1000
"""characters of a state's key; in the place of a longer one stands its digest"""


def reward_of(body: Mapping[str, Any], turns: int) -> tuple[float, int | None]:
    """A reward, and the turn that it is for; None: it is for the episode.

    Args:
        body: what was posted.
        turns: that the episode has had.

    Raises:
        GatewayError: expected a finite number, and one of these turns.
    """
    value, turn = body.get("reward"), body.get("turn")
    if isinstance(value, bool):
        raise _wrong("reward", "a number", value)
    try:
        reward = finite_reward(value, "reward")
    except ValueError as error:
        raise GatewayError(400, "invalid_request", str(error)) from None
    if turn is not None and (isinstance(turn, bool) or not isinstance(turn, int) or not 0 <= turn < turns):
        raise _wrong("turn", f"a number below {turns}", turn)
    return reward, turn


def state_of(body: Mapping[str, Any]) -> str:
    """The key of a state.

    Raises:
        GatewayError: the body holds no text under ``key``.
    """
    key = body.get("key")
    if not isinstance(key, str):
        raise _wrong("key", "text", key)
    return key if len(key) <= LONGEST_KEY else digest(key)


def _wrong(name: str, expected: str, value: Any) -> GatewayError:
    return GatewayError(400, "invalid_request", f"{name}: expected {expected}, got {str(value)[:80]!r}")
