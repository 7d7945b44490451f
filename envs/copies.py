"""Copies of an environment in memory, where its class offers them."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium


def offers_copies(kind: Any) -> bool:
    """Whether a class has a method ``clone()``, or ``metadata["deepcopy"] = True``.

    Hosts copy thread-safe environments only; every other one is cloned by a reset and a replay.
    """
    metadata = getattr(kind, "metadata", None) or {}  # a function instead of a class has none
    return callable(getattr(kind, "clone", None)) or metadata.get("deepcopy") is True


def copied(env: gymnasium.Env[str, str]) -> gymnasium.Env[str, str] | None:
    """An independent copy in the same state, wrappers included; None when the class offers none."""
    core = env.unwrapped
    if not offers_copies(type(core)):
        return None
    make_clone = getattr(core, "clone", None)
    return copy.deepcopy(env, {id(core): make_clone()} if make_clone is not None else None)
