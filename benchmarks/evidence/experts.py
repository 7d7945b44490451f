"""Experts: a planner for rooms behind doors, and TextWorld's own walkthrough from the current state."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import textworld
from minigrid.core.constants import DIR_TO_VEC
from minigrid.minigrid_env import MiniGridEnv
from textworld import EnvInfos

Cell = tuple[int, int]
Pose = tuple[int, int, int]  # x, y, direction


class RoomsPlanner:
    """Shortest paths to the goal through unlocked doors, from wherever the agent is.

    A shortest path passes a door at most once, so a closed door is a cell that takes one more step.
    """

    def __init__(self, env: MiniGridEnv) -> None:
        self._env = env
        cells = {(x, y): env.grid.get(x, y) for x in range(env.width) for y in range(env.height)}
        self._floor = {at for at, cell in cells.items() if cell is None or cell.type != "wall"}
        self._doors = [at for at, cell in cells.items() if cell is not None and cell.type == "door"]
        self._goal = next(at for at, cell in cells.items() if cell is not None and cell.type == "goal")
        self._distances: dict[frozenset[Cell], dict[Pose, int]] = {}

    def best(self) -> list[str]:
        """All first actions of shortest paths from here."""
        env = self._env
        closed = frozenset(at for at in self._doors if not env.grid.get(*at).is_open)
        if closed not in self._distances:
            self._distances[closed] = self._search(closed)
        distances = self._distances[closed]
        here = (int(env.agent_pos[0]), int(env.agent_pos[1]), int(env.agent_dir))
        ways = [(steps + distances[there], action) for action, there, steps in self._moves(here, closed)]
        return [action for length, action in ways if length == min(ways)[0]]

    def _moves(self, pose: Pose, closed: frozenset[Cell]) -> Iterator[tuple[str, Pose, int]]:
        """First action of a move, where it leads, and how many actions it takes."""
        x, y, d = pose
        ahead = _ahead(x, y, d)
        yield "turn left", (x, y, (d - 1) % 4), 1
        yield "turn right", (x, y, (d + 1) % 4), 1
        if ahead in closed:
            yield "toggle", (*ahead, d), 2
        elif ahead in self._floor:
            yield "go forward", (*ahead, d), 1

    def _search(self, closed: frozenset[Cell]) -> dict[Pose, int]:
        """Steps to the goal from every pose."""
        before: dict[Pose, list[tuple[Pose, int]]] = {}
        for x, y in self._floor:
            for d in range(4):
                for _, there, steps in self._moves((x, y, d), closed):
                    before.setdefault(there, []).append(((x, y, d), steps))
        distances: dict[Pose, int] = {}
        todo = [(0, (*self._goal, d)) for d in range(4)]
        while todo:
            steps, pose = heapq.heappop(todo)
            if pose not in distances:
                distances[pose] = steps
                for earlier, further in before.get(pose, ()):
                    heapq.heappush(todo, (steps + further, earlier))
        return distances


def _ahead(x: int, y: int, d: int) -> Cell:
    return x + int(DIR_TO_VEC[d][0]), y + int(DIR_TO_VEC[d][1])


class Accompanied(gymnasium.Wrapper[str, str, str, str]):
    """A game of TextWorld with a second engine that gives the winning commands from the current state.

    Also after detours: an engine with ``policy_commands`` replans after each command.
    """

    def __init__(self, env: gymnasium.Env[str, str]) -> None:
        super().__init__(env)
        self._game: Path | None = None

    def reset(self, **kwargs: Any) -> tuple[str, dict[str, Any]]:
        observation, info = self.env.reset(**kwargs)
        game: Path = self.unwrapped.game
        if game != self._game:
            self._engine = textworld.start(str(game), EnvInfos(policy_commands=True))
            self._game = game
        self._state: Any = self._engine.reset()
        return observation, info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._state, _, _ = self._engine.step(action)
        return self.env.step(action)

    def best(self) -> list[str]:
        """The next command of TextWorld's walkthrough from here."""
        return self._state.policy_commands[:1]
