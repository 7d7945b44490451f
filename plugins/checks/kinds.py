"""Kinds of values in verl's part of a configuration: mapping, list, text, truth value, number or null.

The kind of a key is that of verl's own default. Checks compute with values of these kinds, as verl does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Real
from pathlib import PurePath
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_turnkey.plugins.checks.replaced import STOCK
from verl_turnkey.plugins.config.composing import verls_config_dir
from verl_turnkey.plugins.config.recipe_files import beside_parameters

EXPECTED = {
    "mapping": "a mapping of keys",
    "list": "a list",
    "text": "a text",
    "truth": "true or false",
    "number": "a number",
    "path": "a path",
}
# What verl takes besides: a number is a degree of what a truth value turns on, a name may be a number.
BESIDES: Mapping[str, tuple[str, ...]] = {
    "mapping": (),
    "list": ("text",),
    "text": ("list", "truth", "number"),
    "truth": ("number",),
    "number": ("truth",),
    "path": (),
}
MODEL, TURNS = "actor_rollout_ref.model", "actor_rollout_ref.rollout.multi_turn"
# Where verl's default is null, or says less.
KINDS = {
    "critic.enable": "truth",
    **dict.fromkeys((f"trainer.max_{role}_ckpt_to_keep" for role in ("actor", "critic")), "number"),
    **dict.fromkeys((f"trainer.{what}_data_dir" for what in ("rollout", "validation")), "path"),
    **dict.fromkeys(("data.custom_cls.path", "reward.custom_reward_function.path"), "path"),
    **dict.fromkeys((f"{MODEL}.{key}" for key in ("path", "tokenizer_path", "hf_config_path")), "path"),
    **dict.fromkeys((f"{MODEL}.lora_adapter_path", "critic.model.path"), "path"),
    **dict.fromkeys((f"{TURNS}.{what}_path" for what in ("tool_config", "function_tool")), "path"),
    **dict.fromkeys((f"actor_rollout_ref.actor.{engine}" for engine in ("megatron", "veomni")), "mapping"),
    "actor_rollout_ref.actor.policy_loss.rollout_correction": "mapping",
}


@dataclass(frozen=True)
class Mismatch:
    """A value of another kind than verl's default."""

    key: str
    value: Any
    expected: str
    kind: str

    @property
    def works(self) -> bool:
        """Whether verl takes it somewhere: it does without many keys, and takes a list of files for a file."""
        return self.kind == "null" or self.kind in BESIDES[self.expected]


def mismatches(config: DictConfig) -> Iterator[Mismatch]:
    """Of all keys of verl's, without those that follow another key."""
    yield from _mismatches(config, _kinds(), "")


def _mismatches(config: DictConfig, kinds: Mapping[str, Any], prefix: str) -> Iterator[Mismatch]:
    for name, expected in kinds.items():
        node = config._get_node(name, validate_access=False)
        if node is None or node._is_missing() or node._is_interpolation():  # type: ignore[union-attr]
            continue
        kind = "null" if node._is_none() else _kind(node)  # type: ignore[union-attr]
        if kind == "mapping" and isinstance(expected, Mapping):
            yield from _mismatches(node, expected, f"{prefix}{name}.")
            continue
        wanted = "mapping" if isinstance(expected, Mapping) else expected
        if kind not in (wanted, {"path": "text"}.get(wanted)) and not (kind == "null" and f"{prefix}{name}" in KINDS):
            yield Mismatch(f"{prefix}{name}", config[name], wanted, kind)


def _kind(value: Any) -> str:
    if isinstance(value, DictConfig | Mapping):
        return "mapping"
    if isinstance(value, ListConfig | list | tuple):
        return "list"
    plain = value._value() if OmegaConf.is_config(value) or hasattr(value, "_value") else value
    if isinstance(plain, bool):
        return "truth"
    if is_number(plain):
        return "number"
    return "text" if isinstance(plain, str | PurePath) else "other"


def is_number(value: Any) -> bool:
    """A finite number; true and false are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


@cache
def _kinds() -> dict[str, Any]:
    """The kind of each of verl's keys, nested as they are; without those that are null by default."""
    file = verls_config_dir() / STOCK
    kinds = _kinds_below(OmegaConf.load(file)) if file.is_file() else {}
    for key, kind in KINDS.items():
        *parents, name = key.split(".")
        node = kinds
        for parent in parents:
            node = node.setdefault(parent, {})
        if not isinstance(node.get(name), dict):
            node[name] = kind
    return kinds


def _kinds_below(defaults: Any) -> dict[str, Any]:
    kinds: dict[str, Any] = {}
    for name in defaults:
        try:
            value = None if OmegaConf.is_missing(defaults, name) else defaults[name]
        except OmegaConfBaseException:  # an interpolation of what is not there
            continue
        if value is not None:
            kinds[str(name)] = _kinds_below(value) if isinstance(value, DictConfig) else _kind(value)
    return kinds


def value_at(config: DictConfig, key: str) -> Any:
    """The value of ``key``; None where it is not there, or not to be had: a parent is a list, or of another kind."""
    try:
        return OmegaConf.select(config, key)
    except OmegaConfBaseException:
        return None


def unreadable(config: DictConfig, error: Exception, line: str) -> str:
    """A sentence about an ``error`` of a check that could not compute with a value, in the source's ``line``."""
    others = [
        f"{other.key}={'null' if other.value is None else other.value} (expected {EXPECTED[other.expected]})"
        for other in mismatches(config)
        if beside_parameters("base").get(other.key, other) != other.value
    ]
    if others:
        return f"{', '.join(others)}: verl's default is of another kind, and a check fails on it: {_short(error)}"
    return f"a check cannot read the configuration: {_short(error)} ({line}). HYDRA_FULL_ERROR=1 shows all of the error"


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
