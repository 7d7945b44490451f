"""Adds the YAML files of :mod:`verl_turnkey.recipe` to Hydra's search path for every launch command."""

from __future__ import annotations

import sys

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from verl_turnkey.plugins.config import machine
from verl_turnkey.plugins.config.recipe_files import config_dir


class TurnkeySearchPath(SearchPathPlugin):
    """Appends our folder after verl's own, so that a user's files of the same name win.

    Hydra calls it before it reads the launch line, so the line is checked here first.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        from verl_turnkey.plugins.config.command_line import refuse

        refuse(sys.argv[1:])
        machine.register()
        search_path.append(provider="verl-turnkey", path=f"file://{config_dir()}")
