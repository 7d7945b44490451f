"""Composes verl's configuration for a launch line as verl's main program does, with the YAML files of
:mod:`verl_turnkey.recipe` on Hydra's search path.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any

import yaml
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, OverrideParseException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.plugins.config import machine
from verl_turnkey.plugins.config.command_line import CommandLine, end, refuse
from verl_turnkey.plugins.config.recipe_files import config_dir


def composed(words: Sequence[str]) -> DictConfig:
    """The whole configuration for ``words``, the arguments of a launch line.

    Raises:
        ConfigError: Hydra refuses a word.
    """
    from hydra import compose, initialize_config_dir  # not above: Hydra itself is being imported when it finds us

    Plugins.instance().register(TurnkeySearchPath)
    try:
        with _no_arguments(), initialize_config_dir(str(verls_config_dir()), version_base=None):
            return compose("ppo_trainer", overrides=list(words))
    except HydraException as error:
        raise ConfigError(sentence(error)) from None


_NO_KEY = re.compile(r"Could not override '(?P<key>[^']+)'\. To append to your config use (?P<word>\+\S+)")


def sentence(error: HydraException) -> str:
    """An error of Hydra's in a line that says what to write instead."""
    text = " ".join(f"{error} {error.__cause__ or ''}".split())
    if isinstance(error, OverrideParseException):
        if re.match(r"[^=]+=~", str(error.override)):
            return f"{error.override}: the shell does not expand this ~: write $HOME"
        if "=" not in str(error.override):
            return f"{error.override}: expected an override, key=value"
        return (
            f"{error.override}: Hydra cannot read this override ({text.partition(' See https')[0]}): put a text with "
            "special characters in double quotes, and the whole word in single quotes"
        )
    if match := _NO_KEY.match(text):
        near = _near(match["key"])
        return f"{match['key']}: there is no such key{near or '.'} A key of your own needs a plus: {match['word']}"
    return text.partition(" Config search path:")[0]


def _near(key: str) -> str:
    """``; did you mean 'a.b'?``: the closest key of the same node, else the node that has a key of this name."""
    parent, _, name = key.rpartition(".")
    siblings = [other for other in verls_keys() if other.rpartition(".")[0] == parent]
    elsewhere = [other for other in verls_keys() if other.endswith(f".{name}")]
    return did_you_mean(key, siblings) or (f"; did you mean {elsewhere[0]!r}?" if len(elsewhere) == 1 else "")


def explain() -> None:
    """Make Hydra end the program with :func:`sentence` where it cannot compose a line with keys of ours."""
    from hydra._internal.hydra import Hydra

    hydra: Any = Hydra
    composes = hydra.compose_config
    if composes.__name__ == "explained":
        return

    @wraps(composes)
    def explained(*args: Any, **kwargs: Any) -> Any:
        try:
            return composes(*args, **kwargs)
        except HydraException as error:
            if os.environ.get("HYDRA_FULL_ERROR") == "1" or not CommandLine(sys.argv[1:]).ours:
                raise
            end(ConfigError(sentence(error)))

    explained.__name__ = "explained"
    hydra.compose_config = explained


@cache
def verls_keys() -> frozenset[str]:
    """Every key of verl's own configurations, whatever the training engine; empty if this verl has no such files."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    files = verls_config_dir().glob("_generated_ppo*_trainer.yaml")
    trees = [yaml.load(file.read_text(encoding="utf-8"), loader) for file in files]
    return frozenset(key for tree in trees for key in _keys(tree, ""))


def _keys(tree: Any, prefix: str) -> Iterator[str]:
    for name, value in tree.items() if isinstance(tree, dict) else ():
        yield f"{prefix}{name}"
        yield from _keys(value, f"{prefix}{name}.")


@contextmanager
def _no_arguments() -> Iterator[None]:
    """Our search path checks the arguments of the program, which are not a launch line here."""
    arguments, sys.argv = sys.argv, sys.argv[:1]
    try:
        yield
    finally:
        sys.argv = arguments


def verls_config_dir() -> Path:
    """The folder of verl's YAML files, found without importing verl, which takes seconds."""
    spec: Any = importlib.util.find_spec("verl")
    return Path(spec.submodule_search_locations[0]) / "trainer" / "config"


class TurnkeySearchPath(SearchPathPlugin):
    """Appends our folder after verl's own, so that a user's files of the same name win.

    Hydra calls it before it reads the launch line, so the line is checked here first.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        refuse(sys.argv[1:])
        explain()
        machine.register()
        search_path.append(provider="verl-turnkey", path=f"file://{config_dir()}")
