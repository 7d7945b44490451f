"""SPO's chain: values of the states before the turns in which another n unlikely tokens have been written."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verl_turnkey.advantage.params import check
from verl_turnkey.plugins.rollout.strategies.registry import Fork, ForkPoint, register_strategy
from verl_turnkey.plugins.rollout.strategies.vine import Vine

if TYPE_CHECKING:
    from verl_turnkey.plugins.rollout.episode import Generated


@register_strategy(
    "spo_chain",
    gives=("turn_value", "value_rollouts"),
    trains=False,
    log_probs=True,
    source="SPO, arXiv:2505.23564",
    summary="as vine, from the states before turns in which enough unlikely tokens have come together; with the method "
    "progress, alpha=0",
)
@dataclass(frozen=True)
class SpoChain(Vine):
    """Cuts an episode where the model has been unsure ``every`` times, and measures the value of the state there.

    ::

        u(t) = number of tokens in turns 0 to t whose probability was below ``below``
        measured before turn t if floor(u(t) / every) > floor(u(t-1) / every)

    From each cut K rollouts go on to their end; ``V`` and the states between are those of :class:`.vine.Vine`. The
    method ``progress`` with ``alpha=0`` gives every turn of a stretch the advantage of the stretch, and
    those before the first cut 0.

    SPO cuts a text just before every n-th unlikely token. An environment stands still between turns alone, so a cut
    inside a turn is moved to its beginning. SPO also trains the unlikely tokens alone: the loss ``segment_mask``.
    """

    every: int = 5
    """n: unlikely tokens from one cut to the next; 5 in the paper's first experiments, which has 2 to 100"""
    below: float = 0.9
    """probability below which a token is unlikely"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(0 < self.below <= 1, "below", "a number in (0, 1]", self.below)

    def fork(self, at: ForkPoint) -> None:
        return None

    def doubt(self, at: ForkPoint, turn: Generated) -> Fork | None:
        before = sum(self._unlikely(step.turn) for step in at.steps)
        cut = (before + self._unlikely(turn)) // self.every > before // self.every
        return Fork(self.rollouts, trained=False, turns=self.turns) if cut else None

    def _unlikely(self, turn: Generated) -> int:
        return sum(log_prob < math.log(self.below) for log_prob in turn.log_probs or [])
