"""Episodes that fork, on the tables of ``exact_values.py``: where, the strategy of the rollouts says."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from exact_values import WON, Game, choose

from verl_turnkey.plugins.rollout.budget import Allowance
from verl_turnkey.plugins.rollout.strategies import Fork, Place


@dataclass(frozen=True)
class Turn:
    """What a strategy reads of a turn: the word that was drawn is one token of it."""

    log_probs: list[float]


@dataclass(frozen=True)
class Step:
    """A played turn, and the branch that played it."""

    turn: Turn
    situation: int
    action: int
    branch: int


@dataclass
class Path:
    """A way through an episode; the steps of a branch are those before the fork, too."""

    rollout: int
    branch: int
    now: int
    begins: int = -1
    """turn of the fork that it begins at; -1: at none"""
    depth: int = 0
    steps: list[Step] = field(default_factory=list)

    @property
    def won(self) -> bool:
        return self.now == WON

    @property
    def own(self) -> range:
        """The turns that it has played itself."""
        return range(max(self.begins, 0), len(self.steps))

    def parents(self, root: str) -> list[str]:
        """Key of the path that each of its own steps goes on from, as in the record of a rollout."""
        return [f"{self.rollout}.{self.steps[t - 1].branch}.{t}" if t else root for t in self.own]


class Group:
    """Rollouts of one task, all at their first turn, then all at their second: the order in which they may fork.

    Args:
        strategy: without measured branches.
    """

    def __init__(self, game: Game, rollouts: int, strategy: Any, draw: np.random.Generator) -> None:
        self._game, self._strategy, self._draw = game, strategy, draw
        most = getattr(strategy, "trajectories", None)
        self._allowance = Allowance(None if most is None else max(0, most - rollouts))
        self._branches = [0] * rollouts
        self._paths = [Path(rollout, 0, 0) for rollout in range(rollouts)]

    def play(self, horizon: int) -> list[Path]:
        """All paths to their ends."""
        doubt = getattr(self._strategy, "doubt", None)
        for turn in range(horizon):
            for path in self._paths:  # grows while it is read: a branch plays this turn, too
                if path.won:
                    continue
                place = Place(turn, path.branch, path.depth, cast("Sequence[Any]", path.steps))
                asked = path.begins != turn
                if asked:
                    self._fork(path, self._strategy.fork(place))
                action = choose(self._game, path.now, self._draw)
                written = Turn([math.log(self._game.policy[path.now, action])])
                if asked and doubt is not None:
                    self._fork(path, doubt(place, written))
                path.steps.append(Step(written, path.now, action, path.branch))
                path.now = int(self._game.following[path.now, action])
        return self._paths

    def _fork(self, path: Path, fork: Fork | None) -> None:
        begun = 0
        while fork is not None and begun < fork.branches and self._allowance.take():
            begun += 1
            self._branches[path.rollout] += 1
            branch = self._branches[path.rollout]
            here = {"begins": len(path.steps), "depth": path.depth + 1, "steps": [*path.steps]}
            self._paths.append(replace(path, branch=branch, **here))
        path.depth += begun > 0


def forked(
    games: Iterable[tuple[int, Game]], rollouts: int, horizon: int, strategy: Any, draw: np.random.Generator
) -> dict[str, list[Any]]:
    """The steps of ``rollouts`` rollouts of each game and of their branches, each once; columns of equal length.

    ``group``: the place in ``games``, which may hold a game, with its number, several times; ``game``, ``trajectory``,
    ``turn``, ``situation``, ``action``; ``won``: whether its trajectory did; ``parent``.
    """
    names = ("group", "game", "trajectory", "turn", "situation", "action", "won", "parent")
    columns: dict[str, list[Any]] = {name: [] for name in names}
    trajectory = 0
    for group, (number, game) in enumerate(games):
        for path in Group(game, rollouts, strategy, draw).play(horizon):
            root = str(path.rollout) if strategy.roots == "own" else "start"
            for turn, parent in zip(path.own, path.parents(root), strict=True):
                step = path.steps[turn]
                row = (group, number, trajectory, turn, step.situation, step.action, path.won, parent)
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
            trajectory += 1
    return columns
