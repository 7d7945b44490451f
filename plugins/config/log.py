"""The node ``turnkey.log``: what is written to disk besides verl's own logs."""

from __future__ import annotations

from dataclasses import dataclass

from verl_turnkey.advantage.params import check
from verl_turnkey.plugins.config.roles import Apart, Folder


@dataclass(frozen=True)
class LogConfig:
    """What is written to disk besides verl's own logs."""

    trajectories: Apart[Folder[str | None]] = None
    """folder of the trajectory log, with tables of training and validation episodes; null: none"""
    share: Apart[float] = 1.0
    """share of the groups that are logged, each with all of its episodes; failed episodes always are"""
    episodes_per_step: Apart[int | None] = 256
    """about how many episodes of a step are logged, in whole groups; null: no limit"""
    keep_texts: Apart[int | None] = 20
    """last steps whose texts are kept, besides those of every tenth step; null: all"""
    segment: Apart[str | None] = None
    """set by the driver: the name of this start of the trainer, which the log's files begin with"""
    validation_tasks: Apart[int | None] = None
    """set by the driver: number of validation tasks, of which episodes_per_step are logged; null: unknown"""

    def __post_init__(self) -> None:
        check(0 <= self.share <= 1, "share", "a number in [0, 1]", self.share)
        for name in ("episodes_per_step", "keep_texts", "validation_tasks"):
            value = getattr(self, name)
            check(value is None or value > 0, name, "null or positive", value)
