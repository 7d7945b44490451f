"""Episodes of the plain loop, played in lock-step, which fork where a rollout strategy says."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from forks import Node, node, own, parents
from minimal_loop import Response, Row

from verl_turnkey.envs.prompting.prompts import PromptTurn


@dataclass(frozen=True)
class Step:
    """One turn of an episode."""

    group: int
    rollout: int
    number: int
    prompt: tuple[int, ...]
    turn: Response
    anchor: Any
    next_anchor: Any
    text: str
    action: str | None
    valid: bool
    reward: float
    terminated: bool
    truncated: bool

    @property
    def row(self) -> Row:
        return Row(self.prompt, self.turn.ids)


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
    """turn of the fork where it begins; -1: it is not a branch"""
    depth: int = 0
    trained: bool = True
    turns: int | None = None
    """number of turns after which it ends; None: as every episode"""

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

    @property
    def own(self) -> list[Step]:
        """The steps that it played itself."""
        return [self.steps[t] for t in own(self)]


def trained(players: Sequence[Player]) -> list[tuple[int, Step]]:
    """The steps that become rows, player by player, each with the place of its player."""
    return [(place, step) for place, player in enumerate(players) if player.trained for step in player.own]


def columns(players: Sequence[Player], strategy: Any) -> dict[str, list[Any]]:
    """Columns of the trained steps, as in the records of rollouts."""
    returns: dict[Node, list[float]] = {}
    for player in players:
        if not player.trained:
            value = sum(step.reward for step in player.own)
            returns.setdefault(node(player, player.begins), []).append(value)
    table: dict[str, list[Any]] = {}
    for player in players:
        if player.trained:
            measured = [returns.get(node(player, t), []) for t in range(len(player.steps))]
            of_path = strategy.columns([step.reward for step in player.steps], measured)
            of_own = {name: [values[t] for t in own(player)] for name, values in of_path.items()}
            for name, values in {"parent": parents(player, strategy), **of_own}.items():
                table.setdefault(name, []).extend(values)
    return table
