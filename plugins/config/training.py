"""The nodes ``turnkey.groups``, ``turnkey.update``, ``turnkey.stop`` and ``turnkey.log``: training and its log."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.plugins.config.roles import Apart, Folder, Trained


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


@dataclass(frozen=True)
class UpdateConfig:
    """How a batch of rows becomes optimizer steps."""

    mini_batches: Trained[int | None] = None
    """optimizer steps per batch and epoch; null: train_batch_size / ppo_mini_batch_size, for any episode length"""
    order: Trained[Literal["batch", "reverse_turns"]] = "batch"
    """batch: all turns at once; reverse_turns: turn numbers one by one from the last (SeeUPO)"""
    old_policy: Trained[Literal["turn", "iteration"]] = "turn"
    """reverse_turns: denominator of the ratios, the policy before the turn's update (SeeUPO's code) or at the beginning
    of the step (its paper)"""
    weight_by: Trained[Literal["token", "step", "episode", "task"]] = "token"
    """unit of equal weight in the losses of actor and critic; token: set by loss_agg_mode"""
    ratio_clip: Trained[float] = 0.2
    """reverse_turns: the ratio of a turn and the accumulated one are clipped to [1 - ratio_clip, 1 + ratio_clip]"""
    importance: Trained[Literal["token", "turn", "sequence"] | None] = None
    """importance weights of the policy loss, old policy over rollout: per token, turn or row; null: none"""
    importance_ratio: Trained[Literal["product", "geometric"]] = "product"
    """weight of a turn or row: the product of its tokens' ratios, or their geometric mean"""
    importance_outside: Trained[Literal["truncate", "zero_weight", "clear_mask"]] = "truncate"
    """units outside the bounds; truncate: the weight to importance_high; zero_weight: tokens stay in the mean, entropy,
    KL and the critic; clear_mask: they leave all of these"""
    importance_high: Trained[float] = 2.0
    """upper bound of the weights"""
    importance_low: Trained[float | None] = None
    """zero_weight, clear_mask: lower bound of the weights; null: none"""
    observation_coefficient: Trained[float] = 0.0
    """coefficient of the mean cross-entropy of observations in conversations, beside any policy loss (ECHO); 0: none"""

    def __post_init__(self) -> None:
        check(self.mini_batches is None or self.mini_batches > 0, "mini_batches", "positive", self.mini_batches)
        check(0 < self.ratio_clip < 1, "ratio_clip", "a number in (0, 1)", self.ratio_clip)
        check(
            self.order == "batch" or self.mini_batches is None,
            "mini_batches",
            "null with order=reverse_turns: each turn is one optimizer step per epoch",
            self.mini_batches,
        )
        coefficient = self.observation_coefficient
        check(0 <= coefficient < math.inf, "observation_coefficient", "a finite number >= 0", coefficient)
        low, high = self.importance_low, self.importance_high
        check(high >= 1, "importance_high", "1 or more, the weight of a token on policy", high)
        check(
            low is None or (self.importance_outside != "truncate" and 0 < low <= 1),
            "importance_low",
            "null with importance_outside=truncate, else null or a number in (0, 1]",
            low,
        )


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
    otlp: Apart[str | None] = None
    """URL of an OpenTelemetry receiver (OTLP/HTTP) that gets each logged episode as it ends; null: none"""
    segment: Apart[str | None] = None
    """set by the driver: the name of this start of the trainer, which the log's files begin with"""
    validation_tasks: Apart[int | None] = None
    """set by the driver: number of validation tasks, of which episodes_per_step are logged; null: unknown"""

    def __post_init__(self) -> None:
        check(0 <= self.share <= 1, "share", "a number in [0, 1]", self.share)
        for name in ("episodes_per_step", "keep_texts", "validation_tasks"):
            value = getattr(self, name)
            check(value is None or value > 0, name, "null or positive", value)
