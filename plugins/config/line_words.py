"""Arguments of a launch line on which Hydra's own message does not help: what to write instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.plugins.config.overrides import read
from verl_turnkey.plugins.config.recipe_files import config_dir

KWARGS = "turnkey.env.kwargs"


def check_together(arguments: Sequence[str], overrides: Iterable[str]) -> None:
    """Refuse an option between overrides: Hydra takes the overrides after it for unknown options.

    Raises:
        ConfigError: names the option.
    """
    texts = {*overrides}
    places = [place for place, word in enumerate(arguments) if word in texts]
    between = [word for word in arguments[places[0] : places[-1]] if word.startswith("-")] if places else []
    if between:
        raise ConfigError(
            f"{between[0]} stands between overrides, and Hydra reads those after it as unknown options: write "
            f"{', '.join(between)} before {arguments[places[0]]} or after {arguments[places[-1]]}"
        )


def check_node(text: str, key: str, value: str, groups: Mapping[str, Sequence[str]], nodes: Iterable[str]) -> None:
    """Refuse null or a recipe's name as a node's value: ``turnkey.env=frozenlake`` for ``+turnkey/env=frozenlake``.

    ``nodes``: the keys below ``turnkey`` that have keys of their own.

    Raises:
        ConfigError: names the group, or what to set instead.
    """
    node, group = key.removeprefix("turnkey."), key.replace(".", "/")
    if key.startswith("turnkey.") and node in {*nodes} and value.lower() == "null":
        raise ConfigError(
            f"{text} drops what the recipes set there: leave it out, or set keys below it ({key}.<key>=...)"
        )
    if key.count(".") == 1 and value in groups.get(group, ()):
        raise ConfigError(f"{text}: a recipe is chosen with a slash and one plus: write +{group}={value}")


def check_modifiers(overrides: Iterable[tuple[str, str]]) -> None:
    """Refuse a list of modifiers beside a recipe of one, which it would replace; ``overrides``: text and key of each.

    Raises:
        ConfigError: names both.
    """
    texts = {key: text for text, key in overrides}
    recipe, modifiers = texts.get("turnkey/modifier"), texts.get("turnkey.credit.modify")
    if recipe and modifiers:
        raise ConfigError(
            f"{modifiers} replaces the modifier of {recipe}: list them all in turnkey.credit.modify, and drop {recipe}"
        )


def check_argument(text: str, key: str, recipes: Sequence[tuple[str, str]], added: Iterable[str]) -> None:
    """Refuse an environment argument without a plus that no recipe of the line sets.

    ``recipes``: group and choice of those on the line; ``added``: the keys that the line adds.

    Raises:
        ConfigError: the override with its plus, and the closest argument.
    """
    known = OmegaConf.merge(*({}, *(_arguments(*recipe) for recipe in recipes)))
    for name in _names(text, key):
        if name in known or {KWARGS, f"{KWARGS}.{name}"} & {*added}:
            continue
        listed = ", ".join(map(str, known)) or "none"
        raise ConfigError(
            f"{text}: no recipe of this line sets the argument {name!r}{did_you_mean(name, known) or '.'} An argument "
            f"that they do not set ({listed}) needs a plus: +{f'{KWARGS}.{name}=...' if key == KWARGS else text}"
        )


def _names(text: str, key: str) -> list[str]:
    """The arguments that an override of ``turnkey.env.kwargs``, or of a key below it, sets."""
    if key != KWARGS:
        return [key.removeprefix(f"{KWARGS}.").split(".")[0]]
    value = read(text)[1]
    return list(value) if isinstance(value, dict) else []


def _arguments(group: str, choice: str) -> Any:
    """``turnkey.env.kwargs`` of a recipe, including those of the recipe that it builds on."""
    file: Path = config_dir() / group / f"{choice}.yaml"
    if not file.is_file():
        return {}
    node: Any = OmegaConf.load(file)
    bases = [base for base in node.get("defaults") or [] if base != "_self_"]
    own = OmegaConf.select(node, KWARGS) or OmegaConf.select(node, "env.kwargs") or {}  # by the file's package
    return OmegaConf.merge(*({}, *(_arguments(group, base) for base in bases), own))
