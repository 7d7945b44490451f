"""SLATE: several candidates for each turn from the same state, of which one goes on and all are trained."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.plugins.rollout.strategies.registry import SCORE, Fork, ForkPoint, register_strategy


@register_strategy(
    "siblings",
    gives=(SCORE,),
    source="SLATE, arXiv:2602.23440",
    summary="tries several candidates for each turn: one goes on, all are trained; with the method siblings",
)
@dataclass(frozen=True)
class Siblings:
    """From each state k candidates for the next turn are played, and one of them goes on.

    ::

        A_j = (r_j - mean r) / (std r + 1e-6)        over the k candidates
        P(j goes on) = exp(A_j / eta) / sum over i of exp(A_i / eta)

    The score r_j is the composed reward of the turn, of an episode that is cut after it. std is the sample one.
    """

    candidates: int = 5
    """k: candidates per turn; fewer if the budget allows fewer, or if some fail"""
    eta: float = 0.7
    """temperature of the choice; 0: the best one continues"""
    roots: Literal["shared", "own"] = "own"
    """own: the candidates of a rollout's first turn are compared with each other; shared: with those of its group"""
    turns: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check(self.candidates >= 2, "candidates", "an integer >= 2", self.candidates)
        check(0 <= self.eta < math.inf, "eta", "a finite number >= 0", self.eta)

    @property
    def clones_at_once(self) -> int:
        return self.candidates - 1

    def fork(self, at: ForkPoint) -> Fork:
        return Fork(self.candidates - 1, trained=True, turns=self.turns)

    def choose(self, scores: Sequence[float]) -> int:
        best = max(scores)
        if len(scores) == 1 or self.eta == 0:
            return scores.index(best)
        mean = math.fsum(scores) / len(scores)
        std = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
        # Against the best one, so that nothing overflows.
        weights = [math.exp((score - best) / (std + 1e-6) / self.eta) for score in scores]
        return random.choices(range(len(scores)), weights)[0]

    def columns(self, rewards: Sequence[float], measured: Sequence[Sequence[float]]) -> Mapping[str, Sequence[Any]]:
        return {}  # the score is there already
