"""Composes verl's configuration for a launch line as verl's main program does, without starting it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from omegaconf import DictConfig

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.config.search_path import TurnkeySearchPath


def composed(words: Sequence[str]) -> DictConfig:
    """The whole configuration for ``words``, the arguments of a launch line.

    Raises:
        ConfigError: Hydra refuses a word.
    """
    Plugins.instance().register(TurnkeySearchPath)
    try:
        with _no_arguments(), initialize_config_dir(str(verls_config_dir()), version_base=None):
            return compose("ppo_trainer", overrides=list(words))
    except HydraException as error:
        raise ConfigError(" ".join(f"{error} {error.__cause__ or ''}".split())) from None


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
