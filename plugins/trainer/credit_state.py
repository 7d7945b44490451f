"""State that lasts from batch to batch, as a file in verl's folder of a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import write_text
from verl_turnkey.plugins.config.checkpoint_files import CREDIT as FILE


def folder_of(config: Any, step: int) -> Path:
    """verl's folder of the checkpoint of ``step``."""
    return Path(config.trainer.default_local_dir) / f"global_step_{step}"


def resumed_folder(config: Any, step: int) -> Path:
    """The folder from which a run resumed at ``step``."""
    if config.trainer.resume_mode == "resume_path":
        return Path(config.trainer.resume_from_path)
    return folder_of(config, step)


def save(folder: Path, method: str, state: Mapping[str, float], name: str = FILE) -> None:
    """Write ``state`` into ``folder``, which is created if needed, as the file ``name``; atomically."""
    values = {key: float(value) for key, value in state.items()}
    write_text(folder / name, json.dumps({"method": method, "state": values}, allow_nan=False))


def load(folder: Path, method: str, name: str = FILE) -> dict[str, float] | str:
    """The state of ``method`` in ``folder``, or why there is none.

    Raises:
        ConfigError: the file is not one of :func:`save`.
    """
    file = folder / name
    if not file.is_file():
        return f"there is no {file}"
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        saved_method, state = content["method"], {str(key): float(value) for key, value in content["state"].items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file}: expected the state of a method, got something else ({type(error).__name__}: {error}); "
            "without the file the method starts over"
        ) from error
    if not all(map(math.isfinite, state.values())):
        raise ConfigError(f"{file}: expected finite numbers, got {state}; without the file the method starts over")
    return state if saved_method == method else f"{file} is of the method {saved_method!r}"
