"""Composes verl's configuration for a launch line as verl's main program does, with the YAML files of
:mod:`verl_turnkey.recipe` on Hydra's search path.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.config import machine
from verl_turnkey.plugins.config.recipe_files import config_dir


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


class TurnkeySearchPath(SearchPathPlugin):
    """Appends our folder after verl's own, so that a user's files of the same name win.

    Hydra calls it before it reads the launch line, so the line is checked here first.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from verl_turnkey.plugins.config.command_line import refuse

        refuse(sys.argv[1:])
        machine.register()
        search_path.append(provider="verl-turnkey", path=f"file://{config_dir()}")
