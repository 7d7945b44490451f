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


def entries(space: Any, label: str) -> list[tuple[Any, spaces.Space, str]]:
    """Key, space and dotted label of each entry of a composed space, which has the label ``label`` itself."""
    pairs = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    return [(key, inner, f"{label}.{key}" if label else str(key)) for key, inner in pairs]


def parts(space: spaces.Space, label: str = "") -> Iterator[tuple[str, spaces.Space]]:
    """The spaces that ``space`` is composed of, with dotted labels; a space without parts has the empty label."""
    if not isinstance(space, _COMPOSED):
        yield label, space
        return
    for _, inner, inner_label in entries(space, label):
        yield from parts(inner, inner_label)


def is_picture(space: Any) -> bool:
    """Whether values of ``space`` are RGB images."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) == 3 and space.shape[2] == 3


def pictures(space: spaces.Space, value: Any) -> Iterator[Any]:
    """The images in ``value``, in the order of its parts."""
    if isinstance(space, _COMPOSED):
        for key, inner, _ in entries(space, ""):
            yield from pictures(inner, value[key])
    elif is_picture(space):
        yield value


def without_pictures(space: spaces.Space) -> spaces.Space | None:
    """``space`` without its images; None if nothing is left."""
    if not isinstance(space, _COMPOSED):
        return None if is_picture(space) else space
    kept = {key: rest for key, inner, _ in entries(space, "") if (rest := without_pictures(inner)) is not None}
    return spaces.Dict(kept) if kept else None


def check_space(space: spaces.Space, names: Names, what: str, instead: str) -> None:
    """Refuse a space that has no plain text, and names that do not fit; ``instead``: what to set for it.

    Raises:
        EnvironmentKwargsError: names the part.
    """
    leaves = dict(parts(space))
    for label, part in leaves.items():
        plain = isinstance(part, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box | spaces.Text)
        size = math.prod(part.shape or ()) if not isinstance(part, spaces.Text) else 1
        if not plain or size > LARGEST:
            large = f": {size} numbers are not text, at most {LARGEST} are" if plain else ""
            raise EnvironmentKwargsError(f"{what}{f' {label}' if label else ''} is {part}{large}; set {instead}")
    names_by_label = names if isinstance(names, Mapping) else {"": names} if names else {}
    for label, part_names in names_by_label.items():
        if label not in leaves:
            there = f"its parts are {', '.join(leaves)}" if {*leaves} != {""} else "it has no parts: expected a list"
            raise EnvironmentKwargsError(f"names of the {what}: there is no {label!r}, {there}")
        part = leaves[label]
        number = int(part.n) if isinstance(part, spaces.Discrete) else math.prod(part.shape or ())
        if isinstance(part_names, str) or len(part_names) != number:
            where = f"{what} {label}".strip()
            raise EnvironmentKwargsError(f"names of the {where}: expected a list of {number}, got {part_names!r}")


def names_of(names: Names, label: str) -> Sequence[str]:
    return names.get(label, ()) if isinstance(names, Mapping) else names if not label else ()


def rendered(space: spaces.Space, value: Any, names: Names, digits: int, label: str = "") -> str:
    """``value`` in words: a line per part, with its label."""
    if isinstance(space, _COMPOSED):
        return "\n".join(
            rendered(inner, value[key], names, digits, inner_label) for key, inner, inner_label in entries(space, label)
        )
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
        numbers_by_name = {words(name): int(space.start) + n for n, name in enumerate(names_of(names, label))}
        number = numbers_by_name.get(words(text))
        value: Any = np.int64(int(text) if number is None else number)
    elif isinstance(space, spaces.Text):
        value = text
    else:
        kind = float if isinstance(space, spaces.Box) else int
        numbers = [kind(number) for number in re.split(r"[,\s]+", text.strip("[]() "))]
        value = np.asarray(numbers, dtype=space.dtype).reshape(space.shape or ())
    if not space.contains(value):
        raise ValueError(f"{label} {text!r} is not in {space}".strip())
    return value


def _composed(space: Any, content: Any, names: Names, label: str) -> Any:
    of_dict = isinstance(space, spaces.Dict)
    if not isinstance(content, dict if of_dict else list) or len(content) != len(space.spaces):
        raise ValueError(f"expected a JSON {'object' if of_dict else 'list'} with {len(space.spaces)} entries")
    if of_dict and {*content} != {*space.spaces}:
        raise ValueError(f"expected the keys {', '.join(space.spaces)}")
    values = {key: read(inner, content[key], names, inner_label) for key, inner, inner_label in entries(space, label)}
    return values if of_dict else tuple(values.values())


def how_to_write(space: spaces.Space, names: Names, label: str = "") -> str:
    """What an action is, for the task's text."""
    if isinstance(space, _COMPOSED):
        of_dict = isinstance(space, spaces.Dict)
        written = [(key, how_to_write(inner, names, inner_label)) for key, inner, inner_label in entries(space, label)]
        listed = ", ".join(f'"{key}" ({text})' if of_dict else f"({text})" for key, text in written)
        return f"a JSON {'object' if of_dict else 'list'} with {listed}"
    if part_names := names_of(names, label):
        listed = ", ".join(part_names)
        return f"one of {listed}" if isinstance(space, spaces.Discrete) else f"numbers for {listed}"
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
        images: show those parts of the observation that are RGB images (Box of uint8, height x width x 3) as pictures;
            the others are text.

    ``state_key`` is ``info["state_key"]`` or, without it, a hash of the observation's text and images. Where
    ``info`` has an ``action_mask``, it says which actions are admissible.
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
        images: bool = False,
    ) -> None:
        super().__init__(max_steps)
        check(isinstance(images, bool), "images", "true or false", images)
        check(isinstance(digits, int) and 0 <= digits <= 15, "digits", "an integer from 0 to 15", digits)
        self.world: Any = make(env, env_kwargs)
        self._task, self._actions, self._names, self._digits, self._solved = task, actions, names, digits, solved
        self._show = None if observation is None else load_function(observation, "observation")
        check_space(self.world.action_space, actions, "action space", "another action space: wrap the environment")
        space = self.world.observation_space
        self._images = images
        if images and not any(is_picture(part) for _, part in parts(space)):
            raise EnvironmentKwargsError(
                f"images=true: no part of the observation space is a Box of uint8 (height, width, 3): {space}"
            )
        self._worded = without_pictures(space) if images else space
        if self._show is None and self._worded is not None:
            or_drawn = "images=true, or " if any(is_picture(part) for _, part in parts(self._worded)) else ""
            instead = f"{or_drawn}observation to a function of yours that makes text of it"
            check_space(self._worded, names, "observation space", instead)
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
        if self._show is not None:
            text = str(self._show(observation))
        elif self._worded is None:
            text = ""
        else:
            text = rendered(self._worded, observation, self._names, self._digits)
        drawn = [*pictures(self.world.observation_space, observation)] if self._images else []
        key = info.get("state_key")
        return StepResult(
            text,
            digest(text) if key is None and not drawn else key,
            self._admissible(info),
            images=drawn,
            reward=reward,
            terminated=terminated,
            truncated=truncated,
            success=self._success(info, reward, terminated),
            invalid=bool(info.get("invalid")),
            extra=info.get("extra") or {},
        )

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
