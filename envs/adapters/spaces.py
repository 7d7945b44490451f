"""Any environment of gymnasium in words: its spaces as text, and the model's text as a value of its action space."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

from verl_turnkey.envs.base import StepResult, TextEnv, check, digest, turn_limit, words
from verl_turnkey.envs.errors import EnvironmentKwargsError
from verl_turnkey.envs.registry import make
from verl_turnkey.envs.user_modules import load_function

Names = Mapping[str, Sequence[str]] | Sequence[str]
"""names of a Discrete space's values or of a vector's components: by label, or of a space that is not composed"""
LARGEST = 400
"""numbers that a Box may have as text"""
_COMPOSED = (spaces.Dict, spaces.Tuple)


def parts(space: spaces.Space, label: str = "") -> Iterator[tuple[str, spaces.Space]]:
    """The spaces that ``space`` is composed of, with dotted labels; a space without parts has the empty label."""
    if not isinstance(space, _COMPOSED):
        yield label, space
        return
    entries = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    for key, inner in entries:
        yield from parts(inner, f"{label}.{key}" if label else str(key))


def check_space(space: spaces.Space, names: Names, what: str, instead: str) -> None:
    """Refuse a space that has no plain text, and names that do not fit; ``instead``: what to set for it.

    Raises:
        EnvironmentKwargsError: names the part.
    """
    leaves = dict(parts(space))
    for label, part in leaves.items():
        known = isinstance(part, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box | spaces.Text)
        size = math.prod(part.shape or ()) if not isinstance(part, spaces.Text) else 1
        if not known or size > LARGEST:
            large = f": {size} numbers are not text, at most {LARGEST} are" if known else ""
            raise EnvironmentKwargsError(f"{what}{f' {label}' if label else ''} is {part}{large}; set {instead}")
    names_by_label = names if isinstance(names, Mapping) else {"": names} if names else {}
    for label, own in names_by_label.items():
        if label not in leaves:
            there = f"its parts are {', '.join(leaves)}" if {*leaves} != {""} else "it has no parts: expected a list"
            raise EnvironmentKwargsError(f"names of the {what}: there is no {label!r}, {there}")
        part = leaves[label]
        number = int(part.n) if isinstance(part, spaces.Discrete) else math.prod(part.shape or ())
        if isinstance(own, str) or len(own) != number:
            where = f"{what} {label}".strip()
            raise EnvironmentKwargsError(f"names of the {where}: expected a list of {number}, got {own!r}")


def names_of(names: Names, label: str) -> Sequence[str]:
    return names.get(label, ()) if isinstance(names, Mapping) else names if not label else ()


def rendered(space: spaces.Space, value: Any, names: Names, digits: int, label: str = "") -> str:
    """``value`` in words: a line per part, with its label."""
    if isinstance(space, _COMPOSED):
        entries = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        lines = [
            rendered(inner, value[key], names, digits, f"{label}.{key}" if label else str(key))
            for key, inner in entries
        ]
        return "\n".join(lines)
    text = _leaf(space, value, names_of(names, label), digits)
    return f"{label}: {text}" if label else text


def _leaf(space: spaces.Space, value: Any, names: Sequence[str], digits: int) -> str:
    if isinstance(space, spaces.Text):
        return str(value)
    if isinstance(space, spaces.Discrete):
        return names[int(value) - int(space.start)] if names else str(int(value))
    numbers = np.asarray(value)
    flat = [_number(number, digits) for number in numbers.reshape(-1).tolist()]
    if names:
        return ", ".join(f"{name} {number}" for name, number in zip(names, flat, strict=True))
    if numbers.ndim < 2:
        return " ".join(flat)
    width = numbers.shape[-1]
    return "\n" + "\n".join(" ".join(flat[i : i + width]) for i in range(0, len(flat), width))


def _number(value: float, digits: int) -> str:
    """Without a minus before zero, so that equal texts are equal numbers."""
    return f"{value}" if isinstance(value, int | bool) else f"{round(value, digits) + 0.0:.{digits}f}"


def read(space: spaces.Space, text: Any, names: Names, label: str = "") -> Any:
    """The value of ``space`` that ``text`` denotes; for a composed space the text is JSON.

    Raises:
        ValueError: ``text`` denotes no value of the space; says why.
    """
    if isinstance(space, _COMPOSED):
        return _composed(space, json.loads(text) if isinstance(text, str) else text, names, label)
    if isinstance(text, list):
        text = " ".join(map(str, text))
    text = str(text).strip()
    if isinstance(space, spaces.Discrete):
        known = {words(name): n for n, name in enumerate(names_of(names, label))}
        number = int(space.start) + known[words(text)] if words(text) in known else int(text)
        value: Any = np.int64(number)
    elif isinstance(space, spaces.Text):
        value = text
    else:
        of = float if isinstance(space, spaces.Box) else int
        numbers = [of(number) for number in re.split(r"[,\s]+", text.strip("[]() "))]
        value = np.asarray(numbers, dtype=space.dtype).reshape(space.shape or ())
    if not space.contains(value):
        raise ValueError(f"{label} {text!r} is not in {space}".strip())
    return value


def _composed(space: Any, entries: Any, names: Names, label: str) -> Any:
    of_dict = isinstance(space, spaces.Dict)
    if not isinstance(entries, dict if of_dict else list) or len(entries) != len(space.spaces):
        raise ValueError(f"expected a JSON {'object' if of_dict else 'list'} with {len(space.spaces)} entries")
    keys: list[Any] = [*space.spaces] if of_dict else [*range(len(space.spaces))]
    if of_dict and {*entries} != {*keys}:
        raise ValueError(f"expected the keys {', '.join(keys)}")
    read_parts = [read(space.spaces[key], entries[key], names, f"{label}.{key}" if label else str(key)) for key in keys]
    return dict(zip(keys, read_parts, strict=True)) if of_dict else tuple(read_parts)


def how_to_write(space: spaces.Space, names: Names, label: str = "") -> str:
    """What an action is, for the task's text."""
    if isinstance(space, spaces.Dict):
        entries = [
            f'"{key}" ({how_to_write(inner, names, f"{label}.{key}" if label else str(key))})'
            for key, inner in space.spaces.items()
        ]
        return f"a JSON object with {', '.join(entries)}"
    if isinstance(space, spaces.Tuple):
        entries = [
            f"({how_to_write(inner, names, f'{label}.{n}' if label else str(n))})"
            for n, inner in enumerate(space.spaces)
        ]
        return f"a JSON list with {', '.join(entries)}"
    if own := names_of(names, label):
        return f"one of {', '.join(own)}" if isinstance(space, spaces.Discrete) else f"numbers for {', '.join(own)}"
    if isinstance(space, spaces.Discrete):
        return f"an integer from {space.start} to {space.start + space.n - 1}"
    if isinstance(space, spaces.Text):
        return "a text"
    number = math.prod(space.shape or ())
    if isinstance(space, spaces.MultiBinary):
        return f"{number} numbers, each 0 or 1, separated by spaces"
    if isinstance(space, spaces.MultiDiscrete):
        most = ", ".join(str(int(n) - 1) for n in space.nvec.reshape(-1))
        return f"{number} integers, separated by spaces, from 0 to {most}"
    assert isinstance(space, spaces.Box), space
    low, high = (np.unique(bound).tolist() for bound in (space.low, space.high))
    bounds = f" from {low[0]:g} to {high[0]:g}" if len(low) == len(high) == 1 else ""
    return f"a number{bounds}" if number == 1 else f"{number} numbers{bounds}, separated by spaces"


MOST_ACTIONS = 100
"""actions of a Discrete space that count as admissible, and that prompts list"""


class SpacesText(TextEnv):
    """An environment with ordinary spaces: Dict, Tuple, Discrete, MultiDiscrete, MultiBinary, Box, Text.

    Args:
        env: its gymnasium id, as in ``gymnasium.make``.
        env_kwargs: its arguments.
        task: what to do, in words; how to write an action is added.
        actions: names of the values of a Discrete action space, or of a vector's components; by part for a Dict.
        names: the same for the observation.
        digits: decimals of numbers in observations.
        observation: ``module:function`` from the observation to text, instead.
        solved: return from which an episode counts as solved; None: ``info["success"]`` or ``info["is_success"]``, or
            where there is neither, an end with a positive reward.
        max_steps: steps after which an episode is truncated; None: the environment's own limit.

    ``state_key`` is ``info["state_key"]`` or, without it, a hash of the observation's text. Where ``info`` has an
    ``action_mask``, it says which actions are admissible.
    """

    metadata: ClassVar[dict[str, Any]] = {**TextEnv.metadata, "thread_safe": False, "memory_mb": 200}

    def __init__(
        self,
        env: str,
        env_kwargs: Mapping[str, Any] | None = None,
        task: str = "",
        actions: Names = (),
        names: Names = (),
        digits: int = 3,
        observation: str | None = None,
        solved: float | None = None,
        max_steps: int | None = None,
    ) -> None:
        super().__init__(max_steps)
        check(isinstance(digits, int) and 0 <= digits <= 15, "digits", "an integer from 0 to 15", digits)
        self.world: Any = make(env, env_kwargs)
        self._task, self._actions, self._names, self._digits, self._solved = task, actions, names, digits, solved
        self._show = None if observation is None else load_function(observation, "observation")
        check_space(self.world.action_space, actions, "action space", "another action space: wrap the environment")
        if self._show is None:
            space = self.world.observation_space
            check_space(space, names, "observation space", "observation to a function of yours that makes text of it")
        self._return = 0.0

    @property
    def turn_limit(self) -> int | None:
        return min((limit for limit in (self.max_steps, turn_limit(self.world)) if limit), default=None)

    def begin(self, seed: int) -> tuple[StepResult, str]:
        observation, info = self.world.reset(seed=seed)
        self._return = 0.0
        task = self._task or str(info.get("task", ""))
        how = f"An action is {how_to_write(self.world.action_space, self._actions)}."
        return self._result(observation, info), f"{task}\n{how}" if task else how

    def act(self, action: str) -> StepResult:
        try:
            value = read(self.world.action_space, action, self._actions)
        except (ValueError, OverflowError):  # JSONDecodeError is one
            return self.refused()
        observation, reward, terminated, truncated, info = self.world.step(value)
        self._return += float(reward)
        return self._result(observation, info, float(reward), bool(terminated), bool(truncated))

    def close(self) -> None:
        self.world.close()

    def _result(
        self,
        observation: Any,
        info: Mapping[str, Any],
        reward: float = 0.0,
        terminated: bool = False,
        truncated: bool = False,
    ) -> StepResult:
        text = self._text(observation)
        key = info.get("state_key")
        return StepResult(
            text,
            digest(text) if key is None else key,
            self._admissible(info),
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            success=self._success(info, reward, terminated),
            invalid=bool(info.get("invalid")),
            extra=info.get("extra") or {},
        )

    def _text(self, observation: Any) -> str:
        if self._show is None:
            return rendered(self.world.observation_space, observation, self._names, self._digits)
        return str(self._show(observation))

    def _admissible(self, info: Mapping[str, Any]) -> list[str] | None:
        space = self.world.action_space
        if not isinstance(space, spaces.Discrete) or space.n > MOST_ACTIONS:
            return None
        names = names_of(self._actions, "") or [str(space.start + n) for n in range(space.n)]
        mask = info.get("action_mask")
        allowed = [name for n, name in enumerate(names) if mask is None or mask[n]]
        return allowed or list(names)  # a mask of nothing, as at the end

    def _success(self, info: Mapping[str, Any], reward: float, terminated: bool) -> bool:
        if self._solved is not None:
            return self._return >= self._solved
        for key in ("success", "is_success"):
            if key in info:
                return bool(info[key])
        return terminated and reward > 0
