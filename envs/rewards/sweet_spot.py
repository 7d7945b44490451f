"""SSL, sweet spot learning (arXiv:2601.22491): a tiered reward for coming close, besides the outcome."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.rewards.components import (
    RewardError,
    RewardStep,
    Steps,
    Values,
    at_the_end,
    number,
    register_reward,
)


def tier(closeness: float, tiers: Sequence[float]) -> float:
    """The value of the zone that ``closeness``, from 0 to 1, is in: zones of equal width, the farthest first."""
    return tiers[min(int(closeness * len(tiers)), len(tiers) - 1)]


@register_reward("sweet_spot")
@dataclass(frozen=True)
class SweetSpot:
    """SSL's tiered closeness of the episode, on the last step; its weight is the paper's alpha.

    The closeness of a state, from 0 to 1, is the environment's ``extra[key]``: the share of what is to be matched that
    is matched, or ``exp(-d^2 / 2)`` of a distance d. The states that the steps led to are aggregated, and the result
    falls into one of ``zones`` zones of equal width.

    Source: summaries of arXiv:2601.22491: R = C + alpha S with four zones (quartiles of the matched share), S over the
    steps. Neither alpha nor the values of the tiers are known. Our reading: evenly spaced tiers from 0 to 1, the mean
    over the steps.
    """

    key: str = "closeness"
    """where the closeness stands in the environment's ``info["extra"]``"""
    aggregate: Literal["mean", "max", "last"] = "mean"
    """of the states after the steps: their mean, the best, or the last"""
    zones: int = 4
    """number of zones"""
    tiers: list[float] = field(default_factory=list)
    """values of the zones, the farthest first; empty: evenly spaced from 0 to 1"""

    def __post_init__(self) -> None:
        check(self.zones >= 2, "zones", "an integer >= 2", self.zones)
        fits = not self.tiers or len(self.tiers) == self.zones
        check(fits, "tiers", f"one value for each of the {self.zones} zones, or none", self.tiers)
        rising = all(map(math.isfinite, self.tiers)) and list(self.tiers) == sorted(self.tiers)
        check(rising, "tiers", "finite numbers that do not fall", self.tiers)

    def __call__(self, steps: Steps) -> Values:
        close = [self._closeness(step, f"after step {t}") for t, step in enumerate(steps)]
        for t, value in enumerate(close):
            if not 0 <= value <= 1:
                raise RewardError(
                    f"after step {t}: expected info['extra'][{self.key!r}] to be from 0 to 1, got {value:g}"
                )
        total = {"mean": math.fsum(close) / len(close), "max": max(close), "last": close[-1]}[self.aggregate]
        tiers = self.tiers or [zone / (self.zones - 1) for zone in range(self.zones)]
        return at_the_end(steps, tier(total, tiers))

    def _closeness(self, step: RewardStep, where: str) -> float:
        if step.next_extra is step.extra and self.key not in step.extra:
            return 0.0  # nothing was done yet, and reset did not say: no reason to lose the episode
        return number(step.next_extra, self.key, where)
