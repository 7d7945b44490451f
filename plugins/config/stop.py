"""The node ``turnkey.stop``: how a run ends before its last step, and which checkpoints it leaves."""

from __future__ import annotations

from dataclasses import dataclass

from verl_turnkey.advantage.params import check
from verl_turnkey.plugins.config.roles import Apart


@dataclass(frozen=True)
class StopConfig:
    """When a run stops before its last step, and which checkpoints it leaves."""

    grace: Apart[float] = 600.0
    """seconds after SIGTERM or SIGINT for the step to end and save a checkpoint"""
    patience: Apart[float | None] = 900.0
    """seconds without progress before the run warns; null: no warning, and no watch for dead processes"""

    whole_checkpoints: Apart[int] = 2
    """complete checkpoints that exist at any time; verl's limits are raised to one more"""

    def __post_init__(self) -> None:
        check(self.grace > 0, "grace", "positive seconds", self.grace)
        check(self.patience is None or self.patience > 0, "patience", "null or positive seconds", self.patience)
        check(self.whole_checkpoints >= 1, "whole_checkpoints", "at least 1", self.whole_checkpoints)
