"""What an agent posts beside its calls of the model: rewards, and the keys of its states."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verl_turnkey.envs.answers import finite_reward
from verl_turnkey.envs.base import digest
from verl_turnkey.plugins.gateway.messages import GatewayError
from verl_turnkey.plugins.gateway.turns import Turn

USE_ID = "name the turn by the id of its reply, turn=reply.id"
BY_NUMBER = "a reward of a turn by its number"
LONGEST_KEY = 1000
"""characters of a state's key; in the place of a longer one stands its digest"""


def reply_id(name: str) -> str:
    """The id of a reply, ``<episode>_<turn>``, in what an API calls it: ``chatcmpl-``, ``msg_`` or ``resp_`` before."""
    return re.sub("^(chatcmpl-|msg_|resp_)", "", name)


def turn_of(body: Mapping[str, Any], turns: Sequence[Turn], by_reply: Mapping[str, Turn]) -> Turn | None:
    """The turn that a report names, by its number or by the id of its reply; None: it names none.

    Raises:
        GatewayError: the episode has no such turn.
    """
    name = body.get("turn")
    if name is None:
        return None
    if isinstance(name, str) and (turn := by_reply.get(reply_id(name))) is not None:
        return turn
    if isinstance(name, bool) or not isinstance(name, int) or not 0 <= name < len(turns):
        raise _wrong("turn", f"the id of a reply or a number below {len(turns)}", name)
    return turns[name]


def reward_of(body: Mapping[str, Any]) -> float:
    """The reward that was posted.

    Raises:
        GatewayError: expected a finite number.
    """
    value = body.get("reward")
    if isinstance(value, bool):
        raise _wrong("reward", "a number", value)
    try:
        reward = finite_reward(value, "reward")
    except ValueError as error:
        raise GatewayError(400, "invalid_request", str(error)) from None
    return reward


def state_of(body: Mapping[str, Any]) -> str:
    """The key of a state.

    Raises:
        GatewayError: the body holds no text under ``key``.
    """
    key = body.get("key")
    if not isinstance(key, str):
        raise _wrong("key", "text", key)
    return key if len(key) <= LONGEST_KEY else digest(key)


def unclear(turns: Sequence[Turn], numbered: Iterable[float], parallel_since: float | None) -> str | None:
    """Which report may be of another turn than the agent meant, as calls ran at the same time; None: none.

    ``numbered``: when rewards of turns were posted by number; ``parallel_since``: when two turns ran together first.
    """
    posted: list[tuple[str, float, float, Turn | None]] = [(BY_NUMBER, at, at, None) for at in numbered]
    posted += [("a state for the next turn", t.posted, t.replied, t) for t in turns if t.posted is not None]
    for what, begin, end, own in posted:
        others = any(turn is not own and turn.began < end and turn.replied > begin for turn in turns)
        if others or (parallel_since is not None and parallel_since < end):
            return what
    return None


def _wrong(name: str, expected: str, value: Any) -> GatewayError:
    return GatewayError(400, "invalid_request", f"{name}: expected {expected}, got {str(value)[:80]!r}")
