"""``turnkey recipe``: what the words of a launch line set, each value with its origin."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.cli.recipes import scalar
from verl_turnkey.plugins.config.command_line import check
from verl_turnkey.plugins.config.composing import TurnkeySearchPath, verls_config_dir
from verl_turnkey.plugins.config.schema import credit_params, loss_params, turnkey_config

HEADER = """\
# @package _global_
# turnkey recipe {words}
# What these words set in verl's configuration. After each value: the recipe that sets it (a file in
# recipe/config/turnkey), "default" for a parameter that no recipe sets, or "command line".
"""
#: Column at which origins begin, unless a line is longer.
COLUMN = 64

Leaves = dict[str, tuple[Any, str]]
"""Dotted key -> value, origin."""


def show(words: Sequence[str]) -> str:
    """YAML of all that ``+turnkey=<method>`` and the further ``words`` of a launch line set; a recipe by itself."""
    check(words)
    try:
        config, leaves = _composed(words)
    except HydraException as error:
        raise ConfigError(" ".join(f"{error} {error.__cause__ or ''}".split())) from None
    leaves |= _defaults(config, leaves)
    header = HEADER.format(words=shlex.join(words).removeprefix("+turnkey=").replace("\n", "\\n"))
    return header + "".join(f"{line}\n" for line in _yaml(_tree(leaves), 0))


def _composed(words: Sequence[str]) -> tuple[DictConfig, Leaves]:
    """verl's configuration as a run composes it, and those leaves that recipes or the command line set."""
    Plugins.instance().register(TurnkeySearchPath)
    with initialize_config_dir(str(verls_config_dir()), version_base=None):
        config = compose("ppo_trainer", overrides=list(words))
        loader: Any = GlobalHydra.instance().config_loader()
        # Private, but what Hydra composes from: it knows the folders of the user's hydra.searchpath too.
        overrides, files = loader._parse_overrides_and_create_caching_repo("ppo_trainer", list(words))
        origins: dict[str, str] = {}
        for layer in loader.compute_defaults_list("ppo_trainer", list(words), RunMode.RUN).defaults:
            path = layer.config_path or ""
            if path.startswith("turnkey/"):
                tree = OmegaConf.to_container(files.load_config(path).config)
                origins |= dict.fromkeys(_flat(tree, layer.package), path.removeprefix("turnkey/"))
        for override in overrides:
            if not files.group_exists(override.key_or_group):
                origins |= dict.fromkeys(_flat(override.value(), override.key_or_group), "command line")
    composed = _flat(OmegaConf.to_container(config))
    return config, {key: (value, origins[key]) for key, value in composed.items() if key in origins}


def _defaults(config: DictConfig, leaves: Leaves) -> Leaves:
    """Parameters of the chosen estimator and loss that keep their defaults."""
    from verl_turnkey.envs.user_modules import import_modules

    turnkey = turnkey_config(config)
    import_modules(turnkey.modules)
    defaults: Leaves = {}
    for node, params in (("credit", credit_params(config, turnkey)), ("loss", loss_params(config, turnkey))):
        for entry in fields(params) if params else ():
            if f"turnkey.{node}.{entry.name}" not in leaves:
                defaults[f"turnkey.{node}.{entry.name}"] = getattr(params, entry.name), "default"
    return defaults


def _flat(tree: Any, key: str = "") -> dict[str, Any]:
    """The leaves of a configuration by dotted key; an empty node is a leaf."""
    if not (isinstance(tree, dict) and tree):
        return {key: tree}
    return {k: v for name, value in tree.items() for k, v in _flat(value, f"{key}.{name}".lstrip(".")).items()}


def _tree(leaves: Leaves) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, leaf in leaves.items():
        *nodes, name = key.split(".")
        node = tree
        for part in nodes:
            if not isinstance(node.get(part), dict):
                node[part] = {}  # also where an empty node gets defaults
            node = node[part]
        node[name] = leaf
    return tree


def _yaml(tree: dict[str, Any], indent: int) -> Iterator[str]:
    for name, node in tree.items():
        start = f"{' ' * indent}{name}:"
        if isinstance(node, dict):
            yield start
            yield from _yaml(node, indent + 2)
        else:
            value, origin = node
            yield f"{f'{start} {scalar(value)}':<{COLUMN}}  # {origin}"
