"""Where the YAML files of :mod:`verl_turnkey.recipe` lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import verl_turnkey.recipe


def config_dir() -> Path:
    """Folder that holds the ``turnkey`` config group."""
    return Path(verl_turnkey.recipe.__file__ or "").parent / "config"


@cache
def beside_parameters(method: str) -> Mapping[str, Any]:
    """What the recipe of a method sets beside its own parameters, by key; nothing without a recipe."""
    path = config_dir() / "turnkey" / f"{method}.yaml"
    if not path.is_file():
        return {}
    given: Any = OmegaConf.to_container(OmegaConf.load(path))
    given.pop("defaults", None)
    own = ("algorithm.adv_estimator", "turnkey.credit.")
    return {key: value for key, value in _leaves(given) if not key.startswith(own)}


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
