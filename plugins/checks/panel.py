"""Whether the tasks of a file are played as their panel says: its prompt, limits, rewards, and the same starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from verl_turnkey.envs.panels import Panel, panel_of
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.checks.files import listed
from verl_turnkey.plugins.checks.findings import refuse, warn
from verl_turnkey.plugins.config.playing import differing


def validation_panel(config: DictConfig) -> dict[str, str] | None:
    """Name and hash of the panel that a run validates on; None: no panel, or one that the run plays otherwise."""
    panel = _of_validation(config)
    return None if panel is None or differing(panel, config, arguments=False) else panel.mark


def check_panel(config: DictConfig) -> None:
    """Warn if the validation tasks are those of a panel and are played otherwise."""
    panel = _of_validation(config)
    if panel is not None and (lines := differing(panel, config, arguments=False)):
        warn("panel-changed", panel=panel.name, changes="; ".join(lines))


def check_starts(panel: Panel, tasks: Sequence[Task], places: Mapping[str, Any]) -> None:
    """Refuse to play a panel whose tasks start otherwise on this machine."""
    if other := panel.other_starts(tasks, places):
        spec = panel.content["environment"]
        refuse(
            "panel-start-differs",
            panel=panel.name,
            differing=len(other),
            tasks=len(tasks),
            example=other[0],
            package=spec["package"],
            version=spec["version"],
        )


def _of_validation(config: DictConfig) -> Panel | None:
    files = listed(config, "val_files")
    return panel_of(files[0]) if len(files) == 1 else None
