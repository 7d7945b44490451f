"""The node ``turnkey.update``: how a batch becomes optimizer steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.plugins.config.roles import Trained


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
