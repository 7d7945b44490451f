"""Demonstrations of mixed quality for the DoorKey levels: a planner, the planner with noise, and chance."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from minigrid.core.constants import DIR_TO_VEC
from minigrid.minigrid_env import MiniGridEnv

from verl_turnkey.envs import make
from verl_turnkey.envs.prompting.prompts import PromptTurn

# How much of the data is played how: (share of the episodes, probability of a random action at each step).
QUALITY = ((0.45, 0.0), (0.35, 0.5), (0.2, 1.0))

Pose = tuple[int, int, int, bool, int]  # x, y, direction, key in hand, state of the door
OPEN, CLOSED, LOCKED = 0, 1, 2


@dataclass(frozen=True)
class Demo:
    """What was shown, and what was done about it."""

    task: str
    history: tuple[PromptTurn, ...]
    observation: str
    action: str
    images: tuple[Any, ...] = ()


class Expert(Protocol):
    """Knows the way in the game that is being played."""

    def best(self) -> list[str]:
        """The best actions in the game's present state, all equally good."""
        ...


class Planner:
    """Shortest ways to the goal of a DoorKey level, from wherever the agent is."""

    def __init__(self, env: MiniGridEnv) -> None:
        self._env = env
        self._distances: dict[tuple[int, int] | None, dict[Pose, int]] = {}
        cells = {(x, y): env.grid.get(x, y) for x in range(env.width) for y in range(env.height)}
        self._floor = {at for at, cell in cells.items() if cell is None or cell.type not in ("wall", "door")}
        self._door = next(at for at, cell in cells.items() if cell is not None and cell.type == "door")
        self._goal = next(at for at, cell in cells.items() if cell is not None and cell.type == "goal")

    def best(self) -> list[str]:
        """All actions that lie on a shortest way from here."""
        env, key = self._env, None
        for position, cell in enumerate(env.grid.grid):
            if cell is not None and cell.type == "key":
                key = (position % env.width, position // env.width)
        x, y = map(int, env.agent_pos)
        here = (x, y, int(env.agent_dir), env.carrying is not None, env.grid.get(*self._door).encode()[2])
        distances = self._distances.setdefault(key, {})
        if here not in distances:
            distances.update(self._search(key, here))
        moves = list(self._moves(here, key))
        shortest = min(distances.get(there, 10_000) for _, there in moves)
        return [action for action, there in moves if distances.get(there) == shortest]

    def _moves(self, pose: Pose, key: tuple[int, int] | None) -> Iterator[tuple[str, Pose]]:
        x, y, d, held, door = pose
        ahead = (x + int(DIR_TO_VEC[d][0]), y + int(DIR_TO_VEC[d][1]))
        yield "turn left", (x, y, (d - 1) % 4, held, door)
        yield "turn right", (x, y, (d + 1) % 4, held, door)
        if (ahead in self._floor and (held or ahead != key)) or (ahead == self._door and door == OPEN):
            yield "go forward", (*ahead, d, held, door)
        if ahead == key and not held:
            yield "pick up", (x, y, d, True, door)
        if ahead == self._door and (held or door != LOCKED):
            yield "toggle", (x, y, d, held, CLOSED if door == OPEN else OPEN)

    def _search(self, key: tuple[int, int] | None, start: Pose) -> dict[Pose, int]:
        """Steps to the goal from every pose that can be reached from ``start``."""
        before: dict[Pose, list[Pose]] = {start: []}
        todo = deque([start])
        while todo:
            pose = todo.popleft()
            for _, there in self._moves(pose, key):
                if there not in before:
                    before[there] = []
                    todo.append(there)
                before[there].append(pose)
        distances = {pose: 0 for pose in before if pose[:2] == self._goal}
        todo = deque(distances)
        while todo:
            pose = todo.popleft()
            for earlier in before[pose]:
                if earlier not in distances:
                    distances[earlier] = distances[pose] + 1
                    todo.append(earlier)
        return distances


@dataclass
class Demos:
    """Demonstrations and how often each kind of player won."""

    steps: list[Demo] = field(default_factory=list)
    won: list[float] = field(default_factory=list)


def collect(level: str, seeds: Sequence[int], history: int, max_turns: int, seed: int) -> Demos:
    """Play one episode of a DoorKey level per element of ``seeds``, players in the shares of ``QUALITY``."""
    env = make("turnkey/MiniGrid-v0", {"level": level})
    return collect_in(env, lambda env: Planner(env.unwrapped.grid_env), seeds, history, max_turns, seed)


def collect_in(
    env: Any,
    expert: Callable[[Any], Expert],
    seeds: Sequence[int],
    history: int,
    max_turns: int,
    seed: int,
    quality: Sequence[tuple[float, float]] = QUALITY,
) -> Demos:
    """Play one episode of ``env`` per element of ``seeds``, players in the shares of ``quality``.

    ``expert`` is asked for the way after each reset.
    """
    rng = random.Random(seed)
    demos, wins = Demos(), [[0] for _ in quality]
    for env_seed in seeds:
        player = rng.choices(range(len(quality)), weights=[share for share, _ in quality])[0]
        noise = quality[player][1]
        observation, info = env.reset(seed=env_seed)
        way, task, past = expert(env), info["task"], []
        for _ in range(max_turns):
            action = rng.choice(info["admissible"] if rng.random() < noise else way.best())
            images = tuple(info.get("images", ()))
            demos.steps.append(Demo(task, tuple(past[max(0, len(past) - history) :]), observation, action, images))
            past.append(PromptTurn(observation, action))
            observation, _, terminated, _, info = env.step(action)
            if terminated:
                break
        wins[player].append(info["success"])
    demos.won = [sum(player) / max(1, len(player) - 1) for player in wins]
    return demos
