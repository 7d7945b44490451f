"""gymnasium's toy-text games in words: FrozenLake, Taxi and CliffWalking.

The rules are gymnasium's own classes. In place of their maps the observation says where the agent is, what is next to
it, and how far away everything else is. Until the episode ends it contains the whole state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from gymnasium.envs.toy_text.cliffwalking import CliffWalkingEnv
from gymnasium.envs.toy_text.frozen_lake import MAPS, FrozenLakeEnv, generate_random_map
from gymnasium.envs.toy_text.taxi import TaxiEnv

from verl_turnkey.envs.base import StepResult, TextEnv, check, digest, is_count, shortest_plan, words

REWARDS = ("native", "success")
TILES = {"S": "ice", "F": "ice", "G": "the goal", "H": "a hole"}
LANDMARKS = ("Red", "Green", "Yellow", "Blue")
LARGEST = 16


class _Table(TextEnv):
    """A game that gymnasium describes by a table, ``P[state][move] = [(probability, next state, reward, terminated)]``.

    An action that is none of ``moves`` leaves the state unchanged, counts as a step and sets ``invalid``.
    """

    metadata: ClassVar[dict[str, Any]] = {**TextEnv.metadata, "thread_safe": True, "memory_mb": 1}
    moves: ClassVar[dict[str, int]]
    world: Any
    """gymnasium's environment underneath"""
    task: str

    def __init__(self, max_steps: int | None, reward: str = "native", step_reward: float = -1.0) -> None:
        super().__init__(max_steps)
        check(reward in REWARDS, "reward", f"one of {', '.join(REWARDS)}", reward)
        self.success_only = reward == "success"
        self.wasted = 0.0 if self.success_only else step_reward
        """reward of an action that is none of ``moves``: that of a step, or nonsense would pay more than winning"""

    def begin(self, seed: int) -> tuple[StepResult, str]:
        self.world.reset(seed=seed)
        return self._now(), self.task

    def act(self, action: str) -> StepResult:
        move = self.moves.get(words(action))
        if move is None:
            return replace(self.refused(), reward=self.wasted)
        _, reward, terminated, _, _ = self.world.step(move)
        success = bool(terminated) and self._wins(int(self.world.s))
        return self._now(
            event=self._event(float(reward)),
            reward=float(success) if self.success_only else float(reward),
            success=success,
            terminated=bool(terminated),
        )

    def oracle(self) -> list[str] | None:
        plan = self._plan()
        return plan if plan and (self.max_steps is None or len(plan) <= self.max_steps) else None

    def _now(self, event: str = "", **outcome: Any) -> StepResult:
        state = int(self.world.s)
        return StepResult(event + self._words(state), self._key(state), list(self.moves), **outcome)

    def _plan(self) -> list[str] | None:
        """A shortest list of actions that wins; in a slippery game, that wins with luck."""

        def moves(state: int) -> Iterator[tuple[str, int, bool]]:
            for word, move in self.moves.items():
                for _, after, _, terminated in self.world.P[state][move]:
                    yield word, int(after), bool(terminated) and self._wins(int(after))

        return shortest_plan(int(self.world.s), moves)

    def _neighbours(self, row: int, column: int) -> Iterator[tuple[str, int, int]]:
        """Word, row and column of each neighbour of a place, in the order of the moves."""
        steps = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
        return ((word, row + steps[word][0], column + steps[word][1]) for word in self.moves)

    def _words(self, state: int) -> str:
        """The whole state in words."""
        raise NotImplementedError

    def _key(self, state: int) -> str | int:
        return state

    def _wins(self, state: int) -> bool:
        """Whether the end of the episode in ``state`` is a success."""
        return True

    def _event(self, reward: float) -> str:
        """What the last step did, where the new state does not show it."""
        return ""


class FrozenLakeText(_Table):
    """Walk over a frozen lake to the goal; a hole ends the episode.

    Args:
        size: rows and columns of a random lake, 2 to 16. The seed determines the lake; a path leads to the goal.
        map: a fixed lake: ``4x4`` or ``8x8`` (gymnasium's), or its rows, such as ``["SFH", "FFF", "HFG"]`` (start,
            frozen, hole, goal). None: a random one.
        slippery: whether a move slides to either side with a probability of 1/3 each (gymnasium's default is true).
        max_steps: steps after which the episode is truncated.

    The reward is 1 at the goal. Actions are ``left``, ``down``, ``right``, ``up``. ``state_key`` is a hash of the
    lake and the position. ``oracle`` gives a shortest path, and None for a slippery lake.
    """

    moves: ClassVar[dict[str, int]] = {"left": 0, "down": 1, "right": 2, "up": 3}

    def __init__(
        self, size: int = 4, map: str | Sequence[str] | None = None, slippery: bool = False, max_steps: int | None = 100
    ) -> None:
        super().__init__(max_steps, step_reward=0.0)
        check(is_count(size) and 2 <= size <= LARGEST, "size", f"an integer from 2 to {LARGEST}", size)
        check(isinstance(slippery, bool), "slippery", "true or false", slippery)
        self._size = size
        self._slippery = slippery
        self._fixed = map is not None
        self.task = "Walk over the frozen lake to the goal. Do not step into a hole." + (
            " The ice is slippery: you may slide to either side of where you want to go." if slippery else ""
        )
        if map is not None:
            self._lay(_rows(map))
            self.world.reset(seed=0)
            check(self._plan() is not None, "map", "a lake with a way from S to G", map)

    def begin(self, seed: int) -> tuple[StepResult, str]:
        if not self._fixed:
            self._lay(generate_random_map(self._size, seed=seed))
        return super().begin(seed)

    def oracle(self) -> list[str] | None:
        return None if self._slippery else super().oracle()

    def _lay(self, rows: list[str]) -> None:
        self._rows = rows
        self.world = FrozenLakeEnv(desc=rows, is_slippery=self._slippery)
        self._things = [(r, c, tile) for r, row in enumerate(rows) for c, tile in enumerate(row) if tile in "GH"]

    def _words(self, state: int) -> str:
        height, width = len(self._rows), len(self._rows[0])
        row, column = divmod(state, width)
        here = self._rows[row][column]
        if here in "GH":
            return "You have reached the goal." if here == "G" else "You fell into a hole."
        neighbours = [
            f"{word}: {TILES[self._rows[r][c]] if 0 <= r < height and 0 <= c < width else 'the edge'}"
            for word, r, c in self._neighbours(row, column)
        ]
        away = sorted((abs(r - row) + abs(c - column), r - row, c - column, tile) for r, c, tile in self._things)
        far = {tile: "; ".join(_away(down, right) for _, down, right, t in away if t == tile) for tile in "GH"}
        return (
            f"You are in row {row + 1} of {height}, column {column + 1} of {width}. {', '.join(neighbours)}. "
            f"The goal is {far['G']}. " + (f"Holes: {far['H']}." if far["H"] else "There are no holes.")
        )

    def _key(self, state: int) -> str:
        return digest(self._rows, state)

    def _wins(self, state: int) -> bool:
        row, column = divmod(state, len(self._rows[0]))
        return self._rows[row][column] == "G"


class TaxiText(_Table):
    """Fetch the passenger, bring them to their destination.

    Args:
        reward: ``native`` is gymnasium's own: -1 a step, -10 for a pick-up or drop-off in the wrong place, 20 for the
            delivery. ``success`` gives 1.0 for the delivery and 0.0 otherwise.
        max_steps: steps after which the episode is truncated.

    The seed determines the start (taxi, passenger, destination). Actions are ``south``, ``north``, ``east``, ``west``,
    ``pick up``, ``drop off``. ``state_key`` is gymnasium's number of the state.
    """

    moves: ClassVar[dict[str, int]] = {"south": 0, "north": 1, "east": 2, "west": 3, "pick up": 4, "drop off": 5}

    def __init__(self, reward: str = "native", max_steps: int | None = 200) -> None:
        super().__init__(max_steps, reward)
        self.world = TaxiEnv()
        self.task = (
            "Drive the taxi to the passenger, pick them up, drive to their destination and drop them off. "
            "There are walls between some of the places."
        )

    def _words(self, state: int) -> str:
        world = self.world
        row, column, passenger, destination = (int(part) for part in world.decode(state))

        def place(landmark: int) -> str:
            r, c = world.locs[landmark]
            return f"{LANDMARKS[landmark]}, {_away(r - row, c - column, 'south', 'north', 'east', 'west')}"

        ways = list(self.moves)[:4]
        blocked = [way for way in ways if world.P[state][self.moves[way]][0][1] == state]
        if passenger == destination:
            return "The passenger has arrived."
        return (
            f"The taxi is in row {row + 1} of 5, column {column + 1} of 5. Blocked: {', '.join(blocked) or 'nothing'}. "
            f"The passenger is {'in the taxi' if passenger == len(LANDMARKS) else f'at {place(passenger)}'}. "
            f"The destination is {place(destination)}."
        )


class CliffWalkingText(_Table):
    """Walk along a cliff to the goal; a step off the cliff leads back to the start.

    Args:
        reward: ``native`` is gymnasium's own: -1 a step, -100 for a fall. ``success`` gives 1.0 at the goal and 0.0
            otherwise.
        max_steps: steps after which the episode is truncated.

    The seed has no effect: there is one start. Actions are ``up``, ``right``, ``down``, ``left``. ``state_key``
    is gymnasium's number of the state.
    """

    moves: ClassVar[dict[str, int]] = {"up": 0, "right": 1, "down": 2, "left": 3}

    def __init__(self, reward: str = "native", max_steps: int | None = 200) -> None:
        super().__init__(max_steps, reward)
        self.world = CliffWalkingEnv()
        self.task = (
            "Walk to the goal. Do not step off the cliff: you would fall and have to start again. "
            "The cliff is row 4, from column 2 to column 11."
        )

    def _words(self, state: int) -> str:
        row, column = divmod(state, 12)
        if (row, column) == (3, 11):
            return "You have reached the goal."
        neighbours = []
        for word, r, c in self._neighbours(row, column):
            if not (0 <= r < 4 and 0 <= c < 12):
                tile = "the edge"
            elif r == 3 and c > 0:
                tile = "the goal" if c == 11 else "the cliff"
            else:
                tile = "ground"
            neighbours.append(f"{word}: {tile}")
        return (
            f"You are in row {row + 1} of 4, column {column + 1} of 12. {', '.join(neighbours)}. "
            f"The goal is {_away(3 - row, 11 - column)}."
        )

    def _event(self, reward: float) -> str:
        return "You fell off the cliff and are back at the start. " if reward == -100 else ""


def _rows(map: str | Sequence[str]) -> list[str]:
    """The rows of a lake, checked."""
    if isinstance(map, str):
        check(map in MAPS, "map", f"one of {', '.join(MAPS)}, or a list of rows", map)
        return list(MAPS[map])
    rows = [str(row) for row in map]
    flat = "".join(rows)
    check(
        bool(flat) and len({len(row) for row in rows}) == 1 and set(flat) <= set(TILES) and flat.count("S") == 1,
        "map",
        "rows of equal length of the letters S, F, H, G with one S",
        map,
    )
    return rows


def _away(
    down: int, right: int, south: str = "down", north: str = "up", east: str = "right", west: str = "left"
) -> str:
    """How far away a place is, and in which directions."""
    parts = [(down, south), (-down, north), (right, east), (-right, west)]
    return " and ".join(f"{n} {word}" for n, word in parts if n > 0) or "here"
