"""The rules for what a function that runs an agent may return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.agents.base import AgentFailure, Outcome
from verl_turnkey.envs.answers import finite_reward, plain_values, short_repr

_FIELDS = ("reward", "success", "turns", "extra")


def read_result(value: Any, who: str) -> Outcome:
    """A returned value as an outcome; None: the agent reports its reward itself. ``who`` is named in errors.

    Raises:
        AgentFailure: it is neither a finite number, nor a mapping of the fields with values of their types, nor None.
    """
    if value is None:
        return Outcome()
    try:
        return _outcome(value) if isinstance(value, Mapping) else Outcome(finite_reward(value, "the result"))
    except (TypeError, ValueError) as error:
        raise AgentFailure(
            f"{who} must return a finite number or a dict {{reward, success, turns, extra}}: {error}"
        ) from None


def _outcome(fields: Mapping[str, Any]) -> Outcome:
    for name in fields:
        if name not in _FIELDS:
            raise TypeError(f"there is no field {name!r}{did_you_mean(str(name), _FIELDS) or '.'}")
    reward, success, turns = fields.get("reward"), fields.get("success"), fields.get("turns") or {}
    if success is not None and not isinstance(success, bool | np.bool_):
        raise TypeError(f"success must be a bool, not {short_repr(success)}")
    if not isinstance(turns, Mapping):
        raise TypeError(f"turns must be a dict of turn: reward, not {short_repr(turns)}")
    return Outcome(
        reward=None if reward is None else finite_reward(reward, "reward"),
        success=None if success is None else bool(success),
        turn_rewards={
            turn_name(turn): finite_reward(value, f"the reward of turn {turn}") for turn, value in turns.items()
        },
        extra=plain_values(fields.get("extra") or {}, "extra"),
    )


def turn_name(turn: Any) -> int | str:
    """A turn by its number, as text in a JSON object, or by the id of its reply. Raises TypeError."""
    if isinstance(turn, str) and turn and not turn.removeprefix("-").isdecimal():
        return turn
    try:
        number = int(turn)
    except (TypeError, ValueError):
        number = -1
    if number < 0 or isinstance(turn, bool | float):
        raise TypeError(f"the keys of turns must be 0, 1, 2, ..., not {short_repr(turn)}, or reply ids")
    return number
