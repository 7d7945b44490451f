"""Episodes of the plain loop, which fork where a strategy of the rollouts says: all take a turn, and then the next."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, cast

from policy import Prompt, Said

from verl_turnkey.envs.prompting.memory import PromptTurn
from verl_turnkey.plugins.rollout.budget import Allowance
from verl_turnkey.plugins.rollout.strategies import Fork, Place, read_strategy

Node = tuple[int, int, int]
"""A state on a path: the rollout, its branch that played the step to the state, and the number of the step from it."""


@dataclass(frozen=True)
class Step:
    """One turn of an episode."""

    group: int
    rollout: int
    number: int
    prompt: Prompt
    turn: Said
    anchor: Any
    next_anchor: Any
    text: str
    action: str | None
    valid: bool
    reward: float
    terminated: bool
    truncated: bool

    @property
    def row(self) -> tuple[Prompt, tuple[int, ...]]:
        return self.prompt, self.turn.ids


@dataclass
class Player:
    """An episode in progress, or a branch of one."""

    env: Any
    group: int = 0
    rollout: int = 0
    task: str = ""
    observation: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    past: list[PromptTurn] = field(default_factory=list)
    done: bool = False
    steps: list[Step] = field(default_factory=list)
    """on the way here, those before the fork included"""
    made_by: list[int] = field(default_factory=list)
    """the branch that played each step"""
    branch: int = 0
    begins: int = -1
    """turn of the fork that it begins at; -1: at none"""
    depth: int = 0
    trained: bool = True
    turns: int | None = None
    """after which it ends; None: as every episode"""

    @classmethod
    def start(cls, env: Any, group: int, rollout: int, seed: int) -> Player:
        observation, info = env.reset(seed=seed)
        return cls(env, group, rollout, info["task"], observation, info)

    def fork(self, branch: int, trained: bool, turns: int | None) -> Player:
        """A branch that begins here."""
        made_by, past, t = [*self.made_by], [*self.past], len(self.steps)
        return replace(
            self, env=deepcopy(self.env), past=past, steps=[*self.steps], made_by=made_by, branch=branch, begins=t,
            trained=trained, turns=turns,
        )  # fmt: skip

    def node(self, t: int) -> Node:
        """The state before step ``t``."""
        return self.rollout, self.made_by[t - 1] if t else 0, t

    @property
    def own(self) -> list[Step]:
        """The steps that it has played itself."""
        return self.steps[max(0, self.begins) :]


def trained(players: Sequence[Player]) -> list[tuple[int, Step]]:
    """The steps that become rows, each with the place of its player: each player's own, one player after the other."""
    return [(place, step) for place, player in enumerate(players) if player.trained for step in player.own]


class Forks:
    """The branches of a batch of episodes.

    Args:
        strategy: as ``turnkey.rollout.strategy`` has it.
        rollouts: of each group, besides their branches.
    """

    def __init__(self, strategy: dict[str, Any], rollouts: int) -> None:
        found = read_strategy(strategy)
        assert found is not None
        self._strategy = found[1]
        most = getattr(self._strategy, "trajectories", None)
        self._more = None if most is None else max(0, most - rollouts)
        self._allowances: dict[int, Allowance] = {}
        self._branches: dict[int, int] = {}

    def before(self, players: Sequence[Player]) -> list[Player]:
        """Branches of those that are about to take a turn."""
        return [
            branch
            for player, place in self._places(players)
            for branch in self._begin(player, cast("Fork | None", self._strategy.fork(place)))
        ]

    def written(self, players: Sequence[Player], turns: Sequence[Said]) -> list[Player]:
        """Branches of those that have written a turn which their environment has not seen."""
        doubt = getattr(self._strategy, "doubt", None)
        said = {id(player): turn for player, turn in zip(players, turns, strict=True)}
        places = [] if doubt is None else self._places(players)
        return [branch for player, place in places for branch in self._begin(player, doubt(place, said[id(player)]))]

    def _places(self, players: Sequence[Player]) -> list[tuple[Player, Place]]:
        """Of those that may fork: not where they begin, for there forked the one that they are a branch of."""
        return [
            (player, Place(len(player.steps), player.branch, player.depth, cast("Sequence[Any]", player.steps)))
            for player in players
            if player.trained and player.begins != len(player.steps)
        ]

    def _begin(self, player: Player, fork: Fork | None) -> list[Player]:
        if fork is None:
            return []
        allowance = self._allowances.setdefault(player.group, Allowance(self._more))
        turns = None if fork.turns is None else len(player.steps) + fork.turns
        found: list[Player] = []
        while len(found) < fork.branches and (not fork.trained or allowance.take()):
            branch = self._branches[player.rollout] = self._branches.get(player.rollout, 0) + fork.trained
            found.append(player.fork(branch if fork.trained else player.branch, fork.trained, turns))
            found[-1].depth += fork.trained
        player.depth += bool(found) and fork.trained
        return found

    def columns(self, players: Sequence[Player]) -> dict[str, list[Any]]:
        """Columns of the steps that are trained, as the records of the rollouts have them."""
        returns: dict[Node, list[float]] = {}
        for player in players:
            if not player.trained:
                value = sum(step.reward for step in player.own)
                returns.setdefault(player.node(player.begins), []).append(value)
        columns: dict[str, list[Any]] = {}
        for player in players:
            if player.trained:
                nodes = [player.node(t) for t in range(len(player.steps))]
                rewards = [step.reward for step in player.steps]
                root = str(player.rollout) if getattr(self._strategy, "roots", "shared") == "own" else "start"
                given = {
                    "parent": [f"{rollout}.{branch}.{t}" if t else root for rollout, branch, t in nodes],
                    **self._strategy.columns(rewards, [returns.get(node, []) for node in nodes]),
                }
                for name, values in given.items():
                    columns.setdefault(name, []).extend(values[max(0, player.begins) :])
        return columns
