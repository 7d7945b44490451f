"""Tasks whose values are exact: of every state under a policy, the gradient of the return, and episodes of them.

A family is some tasks, a policy over rows of logits that they share, and a turn limit. Nothing is trained or estimated:
values follow by dynamic programming over the turns left.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_turnkey.advantage import StepBatch
from verl_turnkey.envs import make
from verl_turnkey.envs.adapters.minigrid import ACTIONS

Floats, Ints = NDArray[np.float64], NDArray[np.int64]
LEVEL = "MiniGrid-DoorKey-5x5-v0"
END = -1


@dataclass(frozen=True)
class Table:
    """N states with A actions and K outcomes of each; episodes begin in ``start``."""

    following: Ints
    """the state that follows (N, A, K); ``END`` ends the episode"""
    chance: Floats
    """(N, A, K)"""
    reward: Floats
    """(N, A, K)"""
    key: Sequence[str]
    """what a method sees of each state (N,)"""
    text: Sequence[str]
    """what the policy reads there (N,)"""
    row: Ints
    """its row of logits (N,), the same rows in all tables of a family"""
    start: int = 0


@dataclass(frozen=True)
class Batch:
    """S steps, episode by episode, with their exact advantages."""

    steps: StepBatch
    exact: Floats
    row: Ints
    action: Ints


@dataclass(frozen=True)
class Family:
    """Tables, and a policy over their rows (rows, A)."""

    tables: Sequence[Table]
    policy: Floats
    horizon: int
    keys: str = "state"
    """what a method gets as the state: ``state``; ``history``: all states and actions before; ``never``: none recurs"""
    tasks: int = 8
    """of a batch"""

    @cached_property
    def values(self) -> list[tuple[Floats, Floats]]:
        """Of each table V (horizon + 1, N) and Q (horizon + 1, N, A), by the turns left."""
        result = []
        for table in self.tables:
            shape = table.reward.shape
            v, q = np.zeros((self.horizon + 1, shape[0] + 1)), np.zeros((self.horizon + 1, *shape[:2]))
            for left in range(1, self.horizon + 1):  # the last column of V is END
                q[left] = (table.chance * (table.reward + v[left - 1][table.following])).sum(2)
                v[left, :-1] = (self.policy[table.row] * q[left]).sum(1)
            result.append((v[:, :-1], q))
        return result

    @cached_property
    def gradients(self) -> list[Floats]:
        """Of each table's expected return, with respect to the logits (rows, A)."""
        return [self._gradient(table, *values) for table, values in zip(self.tables, self.values, strict=True)]

    def _gradient(self, table: Table, v: Floats, q: Floats) -> Floats:
        here = np.zeros(len(table.key) + 1)
        here[table.start] = 1.0
        gradient, policy = np.zeros_like(self.policy), self.policy[table.row]
        for left in range(self.horizon, 0, -1):
            flow = here[:-1, None] * policy
            np.add.at(gradient, table.row, flow * (q[left] - v[left][:, None]))
            here = np.bincount(
                table.following.ravel() % len(here), (flow[:, :, None] * table.chance).ravel(), len(here)
            )
            here[-1] = 0.0  # END, which is -1
        return gradient

    @property
    def success(self) -> float:
        """Mean value at the start; where the only reward is 1 for success, its probability."""
        starts = [v[-1, table.start] for table, (v, _) in zip(self.tables, self.values, strict=True)]
        return float(np.mean(starts))

    def draw(self, episodes: int, draw: np.random.Generator) -> tuple[Batch, Floats]:
        """``episodes`` episodes in equal groups, each group on a task of its own; and their exact gradient."""
        tasks = draw.choice(len(self.tables), self.tasks, replace=self.tasks > len(self.tables))
        size = episodes // self.tasks
        parts = [self._episodes(int(task), size, draw) for task in tasks]
        lengths = [len(part["reward"]) for part in parts]
        columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        group = np.repeat(np.arange(self.tasks), lengths)
        trajectory, row, action, exact = (columns.pop(name) for name in ("episode", "row", "choice", "exact"))
        trajectory = trajectory + group * size
        extra = {"next_anchor": columns.pop("next_anchor"), "turn_limit": np.full(len(group), float(self.horizon))}
        batch = StepBatch(group=group, trajectory=trajectory, extra=extra, **columns)
        return Batch(batch, exact, row, action), size * sum(self.gradients[task] for task in tasks)

    def _episodes(self, task: int, size: int, draw: np.random.Generator) -> dict[str, Any]:
        table, (v, q) = self.tables[task], self.values[task]
        state, history = np.full(size, table.start), [""] * size
        rows: list[list[tuple[Any, ...]]] = [[] for _ in range(size)]
        for left in range(self.horizon, 0, -1):
            for i in np.flatnonzero(state != END).tolist():
                s = int(state[i])
                a = sample(self.policy[table.row[s]], draw)
                k = sample(table.chance[s, a], draw)
                following = int(table.following[s, a, k])
                now, history[i] = self._key(table, s, history[i], draw), f"{history[i]}{s}.{a} "
                ahead = self._key(table, following, history[i], draw)
                step = (i, self.horizon - left, table.reward[s, a, k], now, ahead, table.text[s], f"action {a}",
                        following == END, table.row[s], a, q[left, s, a] - v[left, s])  # fmt: skip
                rows[i].append(step)
                state[i] = following
        names = ("episode", "step", "reward", "anchor", "next_anchor", "text", "action", "terminated", "row", "choice",
                 "exact")  # fmt: skip
        columns = {
            name: np.array(values)
            for name, values in zip(names, zip(*chain.from_iterable(rows), strict=True), strict=True)
        }
        gain = np.bincount(columns["episode"], columns["reward"], size)
        last = np.append(np.diff(columns["episode"]) > 0, True)
        return {
            **columns,
            "anchor": columns["anchor"].astype(object),
            "next_anchor": columns["next_anchor"].astype(object),
            "text": columns["text"].astype(object),
            "truncated": last & ~columns["terminated"],
            "success": (gain > 0)[columns["episode"]],
        }

    def _key(self, table: Table, state: int, history: str, draw: np.random.Generator) -> str:
        if self.keys == "never":
            return str(draw.integers(1 << 62))
        return f"{history}{state}" if self.keys == "history" else table.key[state] if state != END else "the end"

    def gradient(self, batch: Batch, advantage: Floats) -> Floats:
        """The policy gradient that ``advantage`` makes of the batch, summed over its steps (rows, A)."""
        gradient = np.zeros_like(self.policy)
        np.add.at(gradient, batch.row, -advantage[:, None] * self.policy[batch.row])
        np.add.at(gradient, (batch.row, batch.action), advantage)
        return gradient


def sample(chances: Floats, draw: np.random.Generator) -> int:
    return min(int(np.searchsorted(chances.cumsum(), draw.random(), side="right")), len(chances) - 1)


def cosine(a: Any, b: Any) -> float:
    """0 where an array is all zeros."""
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return float((a * b).sum() / norms) if norms else 0.0


def softmax(logits: Floats) -> Floats:
    odds = np.exp(logits - logits.max(1, keepdims=True))
    return odds / odds.sum(1, keepdims=True)


def tuned(family: Family, logits: Callable[[float], Floats], success: float) -> Family:
    """The family under the policy of strength x >= 0 whose mean value is nearest to ``success``, by bisection."""
    low, high = 0.0, 16.0
    for _ in range(12):
        middle = (low + high) / 2
        moved = replace(family, policy=softmax(logits(middle)))
        low, high = (middle, high) if moved.success < success else (low, middle)
    return replace(family, policy=softmax(logits((low + high) / 2)))


# --- the families -----------------------------------------------------------------------------------------------------


def maze(seed: int, success: float, keys: str = "state") -> Family:
    """A slippery room of 6 x 6 cells with walls, eight starts, 18 turns; a tabular policy that leans to the goal."""
    size, slip = 6, 0.1
    walls = {(1, 1), (1, 2), (3, 3), (3, 4), (4, 1)}
    cells = [(i, j) for i in range(size) for j in range(size) if (i, j) not in walls and (i, j) != (size - 1, size - 1)]
    number = {cell: k for k, cell in enumerate(cells)} | {(size - 1, size - 1): END}
    moves = np.array([(0, 1), (0, -1), (1, 0), (-1, 0)])
    there = [[number.get((i + di, j + dj), number[i, j]) for di, dj in moves.tolist()] for i, j in cells]
    following = np.repeat(np.array(there)[:, None, :], 4, axis=1)  # each action slips to each direction
    chance = np.tile(np.eye(4) * (1 - slip) + slip / 4, (len(cells), 1, 1))
    text = [f"You stand in row {i}, column {j}." for i, j in cells]
    whole = Table(following, chance, (following == END) * 1.0, text, text, np.arange(len(cells)))
    tables = [replace(whole, start=start) for start in range(0, 24, 3)]
    noise = np.random.default_rng(seed).normal(0, 0.5, (len(cells), 4))
    family = Family(tables, softmax(noise), 18, keys)
    return tuned(family, lambda lean: noise + lean * np.array([1.0, 0, 1, 0]), success)


def dense(seed: int) -> Family:
    """Eight random games of 12 states, 3 actions, 3 successors, with a reward of any sign in each step, 12 turns."""
    draw = np.random.default_rng(seed)
    n, a, k = 12, 3, 3
    tables = []
    for task in range(8):
        following = draw.integers(n, size=(n, a, k))
        following[draw.random((n, a, k)) < 0.05] = END
        reward = np.repeat(draw.normal(0, 1, (n, a, 1)), k, axis=2)
        text = [f"Place {state}." for state in range(n)]
        tables.append(Table(following, draw.dirichlet(np.ones(k), (n, a)), reward, text, text, np.arange(n) + n * task))
    return Family(tables, softmax(draw.normal(0, 0.7, (8 * n, a))), 12)


def dialogue(seed: int, success: float) -> Family:
    """Eight conversations of five turns, 3 actions and 2 replies a turn; success depends on a sum of small effects."""
    draw = np.random.default_rng(seed)
    turns, a, k = 5, 3, 2
    n = sum((a * k) ** depth for depth in range(turns))
    moods = ["glad", "calm", "cross"]
    depth = np.repeat(np.arange(turns), [(a * k) ** d for d in range(turns)])
    first_child = np.arange(n)[:, None, None] * a * k + 1 + np.arange(a * k).reshape(a, k)
    tables = []
    for task in range(8):
        score, gain = np.zeros(n), draw.normal(0, 0.7, (n, a, k))
        text = ["Hello."] * n
        for state in range(n):
            for child, more in zip(first_child[state].ravel(), gain[state].ravel(), strict=True):
                if child < n:
                    score[child], text[child] = (
                        score[state] + more,
                        f"I am {moods[int(np.digitize(-more, [-0.3, 0.3]))]}.",
                    )
        ends = 1 / (1 + np.exp(-2 * (score[:, None, None] + gain)))
        last = (depth == turns - 1)[:, None, None]
        replies = draw.dirichlet(np.ones(k) * 3, (n, a))
        # An outcome is a reply, and after the last reply whether it was a success.
        chance = np.concatenate([replies * np.where(last, ends, 1), replies * np.where(last, 1 - ends, 0)], axis=2)
        following = np.where(last, END, np.concatenate([first_child, first_child], axis=2))
        reward = np.concatenate([np.where(last, np.ones((n, a, k)), 0.0), np.zeros((n, a, k))], axis=2)
        tables.append(Table(following, chance, reward, [str(s) for s in range(n)], text, np.arange(n) + n * task))
    noise = draw.normal(0, 0.5, (8 * n, a))
    family = Family(tables, softmax(noise), turns)
    best = np.concatenate([q[np.minimum(turns, turns - depth), np.arange(n)] for _, q in family.values])
    return tuned(family, lambda lean: noise + lean * best, success)


def doorkey(seed: int, success: float, keys: str = "state") -> Family:
    """MiniGrid's DoorKey 5x5 from its 48 starts, 20 turns; the policy sees what the agent sees."""
    tables = _doorkey()
    rows = 1 + max(int(table.row.max()) for table in tables)
    wise = np.zeros((rows, len(ACTIONS)))
    counts = np.zeros((rows, 1))
    for table in {id(table.following): table for table in tables}.values():  # starts share their game's states
        np.add.at(wise, table.row, _wise(table))
        np.add.at(counts, table.row, 1)
    wise /= counts
    noise = np.random.default_rng(seed).normal(0, 0.5, wise.shape)
    family = Family(tables, softmax(noise), 20, keys)
    return tuned(family, lambda lean: noise + 4 * lean * wise, success)


def _wise(table: Table, discount: float = 0.9) -> Floats:
    """Optimal action values (N, A) of a deterministic table."""
    value = np.zeros(len(table.key) + 1)
    best = np.zeros(table.reward.shape[:2])
    for _ in range(60):
        best = (table.reward + discount * value[table.following])[:, :, 0]
        value[:-1] = best.max(1)
    return best


@cache
def _doorkey() -> tuple[Table, ...]:
    starts = different(LEVEL, range(50_000, 50_400))
    rows: dict[str, int] = {}
    by_states: dict[frozenset[str], Table] = {}
    tables = []
    for seed in starts:
        env = make("turnkey/MiniGrid-v0", {"level": LEVEL, "max_steps": 1_000_000})
        _, info = env.reset(seed=seed)
        known = next((table for keys, table in by_states.items() if info["state_key"] in keys), None)
        if known is None:
            game = states(LEVEL, seed)
            keys = [*game.moves]
            number = {key: k for k, key in enumerate(keys)}
            moves = [[END if to is None else number[to] for to in game.moves[key]] for key in keys]
            following = np.array(moves)[:, :, None]
            text = [game.text[key] for key in keys]
            row = np.array([rows.setdefault(t, len(rows)) for t in text])
            known = Table(following, np.ones(following.shape), (following == END) * 1.0, keys, text, row)
            by_states[frozenset(keys)] = known
        tables.append(replace(known, start=list(known.key).index(info["state_key"])))
    return tuple(tables)


def different(level: str, seeds: Iterable[int]) -> list[int]:
    """The first seed of each start state."""
    env = make("turnkey/MiniGrid-v0", {"level": level})
    first_seeds: dict[str, int] = {}
    for seed in seeds:
        _, info = env.reset(seed=seed)
        first_seeds.setdefault(info["state_key"], seed)
    return list(first_seeds.values())


@dataclass(frozen=True)
class States:
    """A game of MiniGrid: every state that can be reached, its text, and where each action leads; None: solved."""

    task: str
    start: str
    text: dict[str, str]
    moves: dict[str, list[str | None]] = field(default_factory=dict)


@cache
def states(level: str, seed: int) -> States:
    env = make("turnkey/MiniGrid-v0", {"level": level, "max_steps": 1_000_000})
    observation, info = env.reset(seed=seed)
    reached = States(info["task"], info["state_key"], {info["state_key"]: observation})
    waiting = [(info["state_key"], env)]
    while waiting:
        state, env = waiting.pop()
        reached.moves[state] = []
        saved = pickle.dumps(env)  # a third of the time of copy.deepcopy
        for word in ACTIONS:
            there = pickle.loads(saved)
            observation, _, _, _, info = there.step(word)
            key = info["state_key"]
            reached.moves[state].append(None if info["success"] else key)
            if not info["success"] and key not in reached.text:
                reached.text[key] = observation
                waiting.append((key, there))
    return reached
