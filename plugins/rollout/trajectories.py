"""A trajectory of an episode that may fork, with all that is needed to continue it; candidates for a turn."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.answers import Answer
from verl_turnkey.plugins.rollout.budget import Cost
from verl_turnkey.plugins.rollout.episode import Episode, PlayedStep, Prompt
from verl_turnkey.plugins.rollout.prompts import SHARED, Prompts, several_roles

Node = tuple[int, int]
"""A state on a trajectory: the branch that played the step to it, and the number of the step from it."""


@dataclass
class Trajectory:
    """One course of an episode: its steps, and all that is needed to continue."""

    episode: Episode
    prompts: Prompts
    seen: Answer
    """its current state"""
    request_id: str
    sampling: dict[str, Any]
    turns: int
    """number of turns after which it is truncated"""
    environment: Any
    """the open episode of a host; None: it is being cloned"""
    candidates: list[Candidate] = field(default_factory=list)
    """the other candidates for its next turn"""
    prompt: Prompt | None = None
    """of its next turn, once it is built; branches that begin there use it, too"""
    role: Any = None
    """the first role that its states named"""
    trained: bool = True
    begins: int = -1
    """number of steps before the fork at which it begins; -1: it does not begin at a fork"""
    depth: int = 0
    """number of forks with trained branches on it"""
    made_by: list[int] = field(default_factory=list)
    """the branch that played each step"""
    spent: Cost = field(default_factory=Cost)
    """cost of its own steps"""
    most: Cost = field(default_factory=Cost)
    """its reserved cost in the budget"""

    def fork(self, branch: int, trained: bool, turns: int, most: Cost) -> Trajectory:
        """A branch that begins here, still without an environment."""
        steps = [
            replace(step, record={**step.record, "extra": {**step.record["extra"]}}) for step in self.episode.steps
        ]
        return replace(
            self,
            episode=Episode(steps, self.episode.task, branch=branch),
            prompts=self.prompts.fork(),
            turns=turns,
            environment=None,
            candidates=[],
            trained=trained,
            begins=len(steps),
            made_by=[*self.made_by],
            spent=Cost(),
            most=most,
        )

    def check_role(self, shares_memory: bool) -> None:
        """Raise ConfigError if the state's role is not the first one, and prompts show it what that one saw."""
        role = self.seen.role
        self.role = role if self.role is None else self.role
        if shares_memory and role not in (None, self.role):
            raise ConfigError(
                f"the states of an episode name several roles: {several_roles(self.role, role)} [{SHARED}]"
            )

    async def step(self, action: str) -> Answer:
        """One step of the environment."""
        self.spent += Cost(steps=1)
        return await self.environment.step(action)

    def add(self, step: PlayedStep, answer: Answer) -> None:
        """The next step, which led to the state ``answer``."""
        self.episode.steps.append(step)
        self.made_by.append(self.episode.branch)
        self.seen = answer

    def node(self, t: int) -> Node:
        """The state before step ``t``."""
        return (self.made_by[t - 1] if t else 0, t)

    def end(self, cut: bool) -> None:
        """End the episode here; ``cut``: it is truncated unless the environment ended it."""
        self.episode.end(self.seen.info["success"])
        self.episode.steps[-1].record["truncated"] = self.seen.truncated or (cut and not self.seen.terminated)

    def trade(self, other: Trajectory) -> None:
        """Exchange the last turns, taken from the same state, and their outcomes."""
        own_steps, other_steps = self.episode.steps, other.episode.steps
        own_steps[-1], other_steps[-1] = other_steps[-1], own_steps[-1]
        self.prompts, other.prompts = other.prompts, self.prompts
        self.seen, other.seen = other.seen, self.seen
        self.environment, other.environment = other.environment, self.environment


@dataclass(frozen=True)
class Candidate:
    """A branch that is one candidate of several for a turn."""

    branch: Trajectory
    played: asyncio.Future[bool]
    """whether it did not fail"""
    decided: asyncio.Future[None]
    """done when one candidate has been chosen"""

    @classmethod
    def of(cls, branch: Trajectory) -> Candidate:
        loop = asyncio.get_running_loop()
        return cls(branch, loop.create_future(), loop.create_future())
