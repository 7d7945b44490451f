"""Episodes that fork: a strategy says where, the branches play at the same time, and each turn is trained once.

A fork copies what was played and the prompts, and clones the environment. Branches ask the server under the request id
of their episode, so that they come to the server that holds their prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from verl_turnkey.envs import EnvironmentFailure, PromptTooLongError, TaskFormatError
from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.prompting.memory import SummaryError
from verl_turnkey.envs.rewards import RewardError
from verl_turnkey.plugins.rollout.budget import Budget, Cost
from verl_turnkey.plugins.rollout.episode import Episode, PlayedStep
from verl_turnkey.plugins.rollout.prompts import PromptError, Prompts
from verl_turnkey.plugins.rollout.strategies import Place, Strategy

FAILURES = (EnvironmentFailure, PromptError, PromptTooLongError, RewardError, SummaryError, TaskFormatError)
"""what costs an episode or a branch, and not the run"""
NOTHING = dict.fromkeys(
    ("forks", "trained", "measured", "failed", "trained_tokens", "trained_steps", "measured_tokens", "measured_steps"),
    0.0,
)
"""what a rollout says of its branches, before the first one"""
Node = tuple[int, int]
"""A state on a path: the branch that played the step to it, and the number of the step from it."""


@dataclass
class Path:
    """A way through an episode: what was played, and what it takes to play on."""

    episode: Episode
    prompts: Prompts
    seen: Answer
    """the state that it is in"""
    request_id: str
    sampling: dict[str, Any]
    turns: int
    """after which it is truncated"""
    environment: Any
    """the open episode of a host; None: it is being cloned"""
    trained: bool = True
    begins: int = -1
    """the number of steps before the fork that it begins at; -1: it begins at none"""
    depth: int = 0
    """forks with trained branches on it"""
    made_by: list[int] = field(default_factory=list)
    """the branch that played each step"""
    spent: Cost = field(default_factory=Cost)
    """of its own steps"""

    def fork(self, branch: int, trained: bool, turns: int) -> Path:
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
            trained=trained,
            begins=len(steps),
            made_by=[*self.made_by],
            spent=Cost(),
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


class Branching:
    """The branches of one rollout.

    Args:
        walk: plays a path to its end, forking it where it is trained.
        reward: composes the rewards of an episode that has ended.
        failed: told why a branch failed.
    """

    def __init__(
        self,
        strategy: Strategy,
        budget: Budget,
        walk: Callable[[Path, Branching], Awaitable[None]],
        reward: Callable[[Episode], Awaitable[None]],
        failed: Callable[[str], None],
    ) -> None:
        self._strategy, self._budget = strategy, budget
        self._walk, self._reward, self._failed = walk, reward, failed
        self._playing: list[asyncio.Task[None]] = []
        self._clones: list[asyncio.Task[Any]] = []
        self._branches = 0
        self._ended: list[Path] = []
        self._returns: dict[Node, list[float]] = {}
        self._said = dict(NOTHING)

    async def at(self, path: Path) -> None:
        """Fork ``path``, which is about to take a turn, if the strategy says so."""
        t = len(path.episode.steps)
        if t == path.begins:  # the path that it is a branch of forked here
            return
        fork = self._strategy.fork(Place(t, path.episode.branch, path.depth, path.episode.steps))
        if fork is None:
            return
        turns = path.turns if fork.turns is None else min(path.turns, t + fork.turns)
        most = Cost((turns - t) * path.sampling["max_tokens"], turns - t)
        depth, clones = path.depth + fork.trained, []
        while len(clones) < fork.branches and await self._budget.reserve(most, measured=not fork.trained):
            self._branches += fork.trained
            branch = path.fork(self._branches if fork.trained else path.episode.branch, fork.trained, turns)
            branch.depth = depth
            clones.append(asyncio.ensure_future(path.environment.clone()))
            self._clones.append(clones[-1])
            self._playing.append(asyncio.create_task(self._play(branch, clones[-1], most)))
        if clones:
            path.depth = depth
            self._said["forks"] += 1
            await asyncio.wait(clones)  # the state must not change before

    async def finished(self) -> None:
        """Wait for all branches."""
        while playing := [task for task in self._playing if not task.done()]:
            done, _ = await asyncio.wait(playing, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        for task in self._playing:  # some were done before
            task.result()

    async def close(self) -> None:
        """Cancel the branches that still play, and close their environments."""
        tasks: list[asyncio.Task[Any]] = [*self._playing, *self._clones]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for clone in self._clones:
            if not clone.cancelled() and clone.exception() is None:
                clone.result().close()

    async def _play(self, branch: Path, clone: asyncio.Task[Any], most: Cost) -> None:
        kind = "trained" if branch.trained else "measured"
        try:
            branch.environment = await clone
            await self._walk(branch, self)
            await self._reward(branch.episode)
        except FAILURES as error:
            self._said["failed"] += 1
            self._failed(f"{type(error).__name__}: {error}")
        else:
            self._said[kind] += 1
            if branch.trained:
                self._ended.append(branch)
            else:
                rewards = [step.record["composed_reward"] for step in branch.episode.steps]
                self._returns.setdefault(branch.node(branch.begins), []).append(float(sum(rewards[branch.begins :])))
        finally:
            self._said[f"{kind}_tokens"] += branch.spent.tokens
            self._said[f"{kind}_steps"] += branch.spent.steps
            self._budget.give_back(most, branch.spent, measured=not branch.trained)  # else others wait for ever
            if branch.environment is not None:
                branch.environment.close()

    def episodes(self, trunk: Path, session: str) -> list[Episode]:
        """The episode and its branches that have steps of their own, with the columns of their records.

        Each step is one branch's own: of a branch that failed, the first one's that went on from it.

        Args:
            trunk: the episode's path, whose rewards are composed, too.
            session: the number of the rollout in its group.
        """
        root = session if getattr(self._strategy, "roots", "shared") == "own" else "start"
        held: set[tuple[int, int]] = set()
        found = []
        for path in (trunk, *sorted(self._ended, key=lambda each: each.episode.branch)):
            episode, steps = path.episode, path.episode.steps
            own = [(branch, t) not in held for t, branch in enumerate(path.made_by)]
            held |= {(branch, t) for t, branch in enumerate(path.made_by)}
            if not any(own):
                continue
            episode.begins, episode.branching = own.index(True), self._said
            rewards = [step.record["composed_reward"] for step in steps]
            nodes = [path.node(t) for t in range(len(steps))]
            given = self._strategy.columns(rewards, [self._returns.get(node, []) for node in nodes])
            columns = {
                "parent": [f"{session}.{branch}.{t}" if t else root for branch, t in nodes],
                "branch": [float(episode.branch)] * len(steps),
                "depth": [float(path.depth)] * len(steps),
                "leaf_outcome": [float(sum(rewards))] * len(steps),
                **given,
            }
            for t, step in enumerate(steps):
                step.record["extra"] |= {name: values[t] for name, values in columns.items()}
            found.append(episode)
        return found
