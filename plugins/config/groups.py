"""The node ``turnkey.groups``: how often tasks are played, and which groups of episodes are trained."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.plugins.config.roles import Trained


@dataclass(frozen=True)
class GroupsConfig:
    """How often each task of a batch is played, and which groups are trained: a group is the episodes of one task."""

    keep: Trained[float] = 1.0
    """share of a batch that is trained, the groups whose rewards differ most (StarPO-S); 1: all groups"""
    keep_by: Trained[Literal["groups", "spread"]] = "groups"
    """what keep is a share of; groups: their number; spread: the sum of their standard deviations"""
    allocation: Trained[Literal["even", "variance", "prior"]] = "even"
    """how a batch's episodes are divided among its tasks; even: rollout.n each; variance: by how uncertain a task's
    outcomes were (DynaMO); prior: by how far its last outcomes were from earlier ones (V_0.5)"""
    n_low: Trained[int | None] = None
    """allocation: fewest episodes of a task; null: half of rollout.n"""
    n_high: Trained[int | None] = None
    """allocation: most episodes of a task; null: one and a half of rollout.n"""
    decay: Trained[float] = 1.0
    """allocation: factor on the weight of a task's earlier episodes each time it is played; 1: all count equally"""
    hint_low: Trained[float] = 0.0
    """hint share for tasks that are almost always solved without a hint"""
    hint_high: Trained[float] = 0.0
    """hint share for tasks that were never solved, not even once without a hint; 0: no hints (ADHint)"""
    replay: Trained[int] = 0
    """most stored episodes of the same task with the other outcome that join a group in which all ended alike (R^3);
    0: none"""
    replay_age: Trained[int] = 16
    """replay, buffer: steps after which a stored episode is dropped"""
    replay_tasks: Trained[int] = 1024
    """replay: most tasks with stored episodes, in the driver's memory"""
    buffer: Trained[int] = 0
    """most stored groups whose rewards differ; as many join a batch as it has groups whose rewards do not differ (SSB);
    0: none"""

    @property
    def remembers(self) -> bool:
        """Whether settings depend on how earlier episodes of a task ended."""
        return self.allocation != "even" or self.hint_high > 0

    @property
    def stores(self) -> bool:
        """Whether episodes are trained again in later steps."""
        return self.replay > 0 or self.buffer > 0

    def kept(self, groups: float) -> int:
        """How many of so many groups are trained with ``keep_by=groups``; 0: the share is less than one group."""
        return share_of(groups, self.keep)

    def bounds(self, n: int) -> tuple[int, int]:
        """Fewest and most episodes of a task, with ``n`` on average."""
        low = max(2, math.ceil(n / 2)) if self.n_low is None else self.n_low
        return low, n + n // 2 if self.n_high is None else self.n_high

    def __post_init__(self) -> None:
        check(0 < self.keep <= 1, "keep", "a number in (0, 1]", self.keep)
        for name in ("n_low", "n_high"):
            value = getattr(self, name)
            check(value is None or value > 0, name, "null or positive", value)
        check(0 <= self.decay <= 1, "decay", "a number in [0, 1]", self.decay)
        check(0 <= self.hint_high <= 1, "hint_high", "a number in [0, 1]", self.hint_high)
        check(0 <= self.hint_low <= self.hint_high, "hint_low", "a number from 0 to hint_high", self.hint_low)
        check(self.replay >= 0, "replay", "0 or positive", self.replay)
        check(self.buffer >= 0, "buffer", "0 or positive", self.buffer)
        check(self.replay_age > 0, "replay_age", "positive", self.replay_age)
        check(self.replay_tasks > 0, "replay_tasks", "positive", self.replay_tasks)
        check(self.keep < 1 or self.keep_by == "groups", "keep_by", "groups with keep=1", self.keep_by)


def share_of(number: float, share: float) -> int:
    """``share`` of ``number``, rounded down."""
    return int(share * number + 1e-9)  # 0.29 * 100 is below 29
