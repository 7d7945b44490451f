"""Episodes that fork where a rollout strategy says, on the tables of ``exact_values.py``."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from exact_values import WON, Game, choose

sys.path.append(str(Path(__file__).parent / "evidence"))
from forks import Forks, own, parents


@dataclass(frozen=True)
class Turn:
    """What a strategy reads of a turn; an action counts as one token."""

    log_probs: list[float]


@dataclass(frozen=True)
class Step:
    """A played turn, and the branch that played it."""

    turn: Turn
    situation: int
    action: int
    branch: int


@dataclass
class EpisodePath:
    """A path through an episode; a branch has the steps before its fork, too."""

    rollout: int
    now: int = 0
    branch: int = 0
    begins: int = -1
    depth: int = 0
    trained: bool = True
    steps: list[Step] = field(default_factory=list)
    group: int = 0

    @property
    def won(self) -> bool:
        return self.now == WON

    @property
    def made_by(self) -> list[int]:
        return [step.branch for step in self.steps]

    def fork(self, branch: int, trained: bool, turns: int | None) -> EpisodePath:
        return replace(self, branch=branch, begins=len(self.steps), trained=trained, steps=[*self.steps])


def play(game: Game, rollouts: int, horizon: int, strategy: Any, draw: np.random.Generator) -> list[EpisodePath]:
    """Rollouts of one task and their branches, all at their first turn, then all at their second."""
    forks, paths = Forks(strategy, rollouts), [EpisodePath(rollout) for rollout in range(rollouts)]
    for _ in range(horizon):
        for path in paths:  # grows while it is read: a branch plays this turn, too
            if path.won:
                continue
            paths += forks.before([path])
            action = choose(game, path.now, draw)
            written = Turn([math.log(game.policy[path.now, action])])
            paths += forks.written([path], [written])
            path.steps.append(Step(written, path.now, action, path.branch))
            path.now = int(game.following[path.now, action])
    return paths


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
        for path in play(game, rollouts, horizon, strategy, draw):
            for turn, parent in zip(own(path), parents(path, strategy), strict=True):
                step = path.steps[turn]
                row = (group, number, trajectory, turn, step.situation, step.action, path.won, parent)
                for column, value in zip(columns.values(), row, strict=True):
                    column.append(value)
            trajectory += 1
    return columns
