"""Values of gymnasium's spaces as text, and text as values: Discrete, MultiDiscrete, MultiBinary, Box, Text, and Dict
and Tuple of them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from verl_turnkey.envs.base import words
from verl_turnkey.envs.errors import EnvironmentKwargsError

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
