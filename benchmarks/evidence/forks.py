"""Episodes that are played turn by turn and fork where rollout strategies say, without verl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, cast

from verl_turnkey.plugins.rollout.branching import Allowance
from verl_turnkey.plugins.rollout.strategies import Fork, ForkPoint

Node = tuple[int, int, int]
"""A state on a path: the rollout, its branch that played the step to the state, and the number of the step from it."""
P = TypeVar("P", bound="Path")


class Path(Protocol):
    """A path through an episode: the episode itself, or a branch of it."""

    group: int
    rollout: int
    branch: int
    """0: the episode itself"""
    begins: int
    """turn of the fork where it begins; -1: it is not a branch"""
    depth: int
    """forks with trained branches on the way here"""
    trained: bool

    @property
    def steps(self) -> Sequence[Any]:
        """on the way here, those before the fork included; strategies may read ``turn.log_probs`` of each"""

    @property
    def made_by(self) -> Sequence[int]:
        """the branch that played each step"""

    def fork(self: P, branch: int, trained: bool, turns: int | None) -> P:
        """A branch that begins here; it ends after turn ``turns`` of the episode, None: as every episode."""


def own(path: Path) -> range:
    """Numbers of the steps that a path played itself."""
    return range(max(0, path.begins), len(path.steps))


def node(path: Path, t: int) -> Node:
    """The state before step ``t``."""
    return path.rollout, path.made_by[t - 1] if t else 0, t


def parents(path: Path, strategy: Any) -> list[str]:
    """``extra.parent`` of its own steps, as in the records of rollouts."""
    root = str(path.rollout) if getattr(strategy, "roots", "shared") == "own" else "start"
    return [".".join(map(str, node(path, t))) if t else root for t in own(path)]


class Forks:
    """The branches of a batch of episodes.

    Args:
        strategy: one that does not choose among candidates, and does not ask the model.
        rollouts: of each group, besides their branches.
    """

    def __init__(self, strategy: Any, rollouts: int) -> None:
        self.strategy = strategy
        most = getattr(strategy, "trajectories", None)
        self._more = None if most is None else max(0, most - rollouts)
        self._allowances: dict[int, Allowance] = {}
        self._branches: dict[int, int] = {}

    def before(self, paths: Sequence[P]) -> list[P]:
        """Branches of paths that are about to take a turn."""
        return [
            branch
            for path, point in self._fork_points(paths)
            for branch in self._begin(path, cast("Fork | None", self.strategy.fork(point)))
        ]

    def written(self, paths: Sequence[P], turns: Sequence[Any]) -> list[P]:
        """Branches of paths whose turn is written, but not yet played."""
        doubt = getattr(self.strategy, "doubt", None)
        turn_of = {id(path): turn for path, turn in zip(paths, turns, strict=True)}
        points = [] if doubt is None else self._fork_points(paths)
        return [branch for path, point in points for branch in self._begin(path, doubt(point, turn_of[id(path)]))]

    def _fork_points(self, paths: Sequence[P]) -> list[tuple[P, ForkPoint]]:
        """The next fork points of trained paths; none at a path's own beginning, where its parent forked already."""
        return [
            (path, ForkPoint(len(path.steps), path.branch, path.depth, cast("Sequence[Any]", path.steps)))
            for path in paths
            if path.trained and path.begins != len(path.steps)
        ]

    def _begin(self, path: P, fork: Fork | None) -> list[P]:
        if fork is None:
            return []
        allowance = self._allowances.setdefault(path.group, Allowance(self._more))
        turns = None if fork.turns is None else len(path.steps) + fork.turns
        begun: list[P] = []
        for _ in range(allowance.take(fork.branches) if fork.trained else fork.branches):
            branch = self._branches[path.rollout] = self._branches.get(path.rollout, 0) + fork.trained
            begun.append(path.fork(branch if fork.trained else path.branch, fork.trained, turns))
            begun[-1].depth += fork.trained
        path.depth += bool(begun) and fork.trained
        return begun
