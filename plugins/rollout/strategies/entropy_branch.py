"""ARPO: where the model is less sure of a turn than of its first one, branches go on from the state before it."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.plugins.rollout.strategies.registry import Fork, ForkPoint, register_strategy

if TYPE_CHECKING:
    from verl_turnkey.plugins.rollout.episode import Generated


@register_strategy(
    "entropy_branch",
    log_probs=True,
    source="ARPO, arXiv:2507.19849",
    summary="forks where the entropy of a turn's first tokens is above that of the first turn; with the method tree, "
    "rule=arpo",
)
@dataclass(frozen=True)
class EntropyBranch:
    """Where a turn t >= 1 begins with more entropy than turn 0, its trajectory forks in the state before it.

    ::

        dH(t) = sum over the first tokens of (H(t) - H(0)) / log(vocabulary)
        P(t) = alpha + beta dH(t)
        fork before turn t if P(t) > tau; with tau=None with probability P(t), as the released code does

    Verl's server returns the log-probability of the sampled token alone. H of a token is estimated by minus that, which
    has the entropy as its mean. Tokens that only one of the two turns has are not compared.

    The paper divides by the vocabulary; its released code, which is followed here, by the logarithm, sums the entropies
    of the ten likeliest tokens, and forks after the turn that it has measured. Where branches are missing at the end,
    paper and code fill up with fresh rollouts; here a group has fewer trajectories.
    """

    trajectories: int = 16
    """M: most trajectories of a group, of which actor_rollout_ref.rollout.n are rollouts (8 in the paper)"""
    branches: int = 2
    """most trajectories that continue from a fork, including the one that reached it"""
    alpha: float = 0.5
    """P of a turn that is as sure as the first one"""
    beta: float = 0.2
    """weight of the entropy in P"""
    tau: float | None = 0.5
    """fork where P is above; null: with probability P"""
    tokens: int = 20
    """most tokens compared at the beginning of each turn"""
    vocabulary: int = 151936
    """size of the model's vocabulary, for the scale of the entropy; that of Qwen2.5"""
    roots: Literal["shared", "own"] = "shared"
    """as in tree"""
    first: ClassVar[int] = 1
    """the first turn before which a trajectory can fork"""

    def __post_init__(self) -> None:
        check(self.trajectories >= 2, "trajectories", "an integer >= 2", self.trajectories)
        check(self.branches >= 2, "branches", "an integer >= 2", self.branches)
        for key in ("alpha", "beta", "tau"):
            value = getattr(self, key)
            check(value is None or math.isfinite(value), key, "a finite number", value)
        check(self.tokens >= 1, "tokens", "an integer >= 1", self.tokens)
        check(self.vocabulary >= 2, "vocabulary", "an integer >= 2", self.vocabulary)

    def fork(self, at: ForkPoint) -> None:
        return None

    def doubt(self, at: ForkPoint, turn: Generated) -> Fork | None:
        if not at.steps:
            return None
        now, first = ((written.log_probs or [])[: self.tokens] for written in (turn, at.steps[0].turn))
        more = math.fsum(b - a for a, b in zip(now, first, strict=False)) / math.log(self.vocabulary)
        bound = random.random() if self.tau is None else self.tau
        return Fork(self.branches - 1, trained=True) if self.alpha + self.beta * more > bound else None

    def columns(self, rewards: Sequence[float], measured: Sequence[Sequence[float]]) -> Mapping[str, Sequence[Any]]:
        return {}
