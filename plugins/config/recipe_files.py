"""The YAML files of :mod:`verl_turnkey.recipe`: their folder, the values in one, and the words of rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import verl_turnkey.recipe

if TYPE_CHECKING:
    from omegaconf import DictConfig


def config_dir() -> Path:
    """Folder of the ``turnkey`` config group."""
    return Path(verl_turnkey.recipe.__file__ or "").parent / "config"


@cache
def beside_parameters(method: str) -> Mapping[str, Any]:
    """What the recipe of a method sets besides its own parameters, by key; empty without a recipe."""
    path = config_dir() / "turnkey" / f"{method}.yaml"
    if not path.is_file():
        return {}
    from omegaconf import DictConfig, OmegaConf  # commands that only read a run do without

    own = ("defaults", "algorithm.adv_estimator", "turnkey.credit.")
    return {key: value for key, value in leaves(DictConfig(OmegaConf.load(path))) if not key.startswith(own)}


def leaves(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a configuration with its full key, lists as one value; without missing ones."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    for name in node:
        key = f"{prefix}{name}"
        if OmegaConf.is_missing(node, name):
            continue
        try:
            value = node[name]
        except OmegaConfBaseException:  # an interpolation of a missing key
            continue
        if isinstance(value, DictConfig):
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


@cache
def rule_texts() -> Mapping[str, Mapping[str, str]]:
    """The rules of the checks by their ids: level, words, and launch lines that trip them or not."""
    import yaml

    text = (config_dir().parent / "rules.yaml").read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def rule_words(id: str, /, **values: object) -> str:
    """The message of the rule ``id``; ``values``: of its fields."""
    return rule_texts()[id]["words"].format(**values)
