"""Trees of episodes: at chosen turns branches continue from the same state, and all are trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.plugins.rollout.strategies.registry import Fork, ForkPoint, register_strategy


@register_strategy(
    "tree",
    source="the sampler is our own; TreeRL, arXiv:2506.11902, and Tree-GRPO, arXiv:2509.21240, for the credit",
    summary="forks at chosen turns into branches that are trained and fork as well; with the method tree",
)
@dataclass(frozen=True)
class Tree:
    """Before turns ``first``, ``first + every``, ... a trajectory forks into ``branches``, up to ``depth`` forks deep.

    An episode has at most branches ** depth leaves. The method ``tree`` compares each branch with its siblings, by the
    outcomes of the leaves below it; its columns every strategy gives (``extra.parent``).

    The turns are chosen in advance, and not by entropy (TreeRL) or at random (Tree-GRPO): our own, as is the sampler.
    """

    branches: int = 2
    """trajectories that continue from a fork, including the one that reached it"""
    first: int = 1
    """the first turn before which a trajectory forks; before turn 0 the rollouts of a group are siblings anyway"""
    every: int = 2
    """turns from a fork to the next one"""
    depth: int = 2
    """most forks from the start to a leaf"""
    roots: Literal["shared", "own"] = "shared"
    """shared: the first turns of a group's rollouts are siblings; own: each rollout is a tree, which the method's
    rule=tree_grpo needs"""

    def __post_init__(self) -> None:
        check(self.branches >= 2, "branches", "an integer >= 2", self.branches)
        check(self.first >= 0, "first", "zero or more", self.first)
        check(self.every >= 1, "every", "an integer >= 1", self.every)
        check(self.depth >= 1, "depth", "an integer >= 1", self.depth)

    @property
    def clones_at_once(self) -> int:
        return self.branches**self.depth - 1

    def fork(self, at: ForkPoint) -> Fork | None:
        due = at.turn >= self.first and (at.turn - self.first) % self.every == 0
        return Fork(self.branches - 1, trained=True) if due and at.depth < self.depth else None

    def columns(self, rewards: Sequence[float], measured: Sequence[Sequence[float]]) -> Mapping[str, Sequence[Any]]:
        return {}
