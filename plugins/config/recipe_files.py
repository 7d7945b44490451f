"""Where the YAML files of :mod:`verl_turnkey.recipe` lie."""

from __future__ import annotations

from pathlib import Path

import verl_turnkey.recipe


def config_dir() -> Path:
    """Folder that holds the ``turnkey`` config group."""
    return Path(verl_turnkey.recipe.__file__ or "").parent / "config"
