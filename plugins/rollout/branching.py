"""Episodes that fork: a strategy decides where, the branches play concurrently, and each turn is trained once.

A fork copies the steps and the prompts, and clones the environment. A turn that is written but not yet played has not
changed the environment: a trajectory can still fork before it. If a strategy chooses, the branches are candidates for
one turn: the trajectory waits for them and continues with the chosen one. Branches use the request id of their episode,
so that they reach the server that has their prefix cached.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from verl_turnkey.envs import EnvironmentFailure, PromptTooLongError, TaskFormatError
from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.prompting.prompts import SummaryError
from verl_turnkey.envs.rewards import RewardError
from verl_turnkey.plugins.rollout.action_reader import ActionReader
from verl_turnkey.plugins.rollout.episode import Episode, Generated, PlayedStep, Prompt
from verl_turnkey.plugins.rollout.prompts import PromptError, Prompts
from verl_turnkey.plugins.rollout.strategies import SCORE, Ask, Fork, ForkPoint, Strategy

if TYPE_CHECKING:
    from verl_turnkey.plugins.rollout.turn_answer import Opponents


@dataclass(frozen=True)
class Cost:
    """Tokens that the model writes, and steps of the environment."""

    tokens: int = 0
    steps: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.tokens + other.tokens, self.steps + other.steps)

    def __mul__(self, times: int) -> Cost:
        return Cost(self.tokens * times, self.steps * times)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.tokens - other.tokens, self.steps - other.steps)


class Budget:
    """The cost of all branches of an episode: never above its limits, and no branch is cut to stay below.

    The number of branches at a state is fixed before the first one begins: as many as fit at their maximum cost. What
    they do not use is free for later states. If their number depended on the cost of the first ones, the measured
    value would be biased, since short rollouts would count more often than long ones.

    Args:
        tokens, steps: the limits; None: none.
        at_once: measured branches that run at the same time.
    """

    def __init__(self, tokens: int | None, steps: int | None, at_once: int) -> None:
        self._tokens, self._steps, self._at_once = tokens, steps, at_once
        self._taken = Cost()  # spent, and reserved
        self._measuring = 0
        self._returned = asyncio.Event()

    async def reserve(self, most: Cost, branches: int) -> int:
        """Reserve up to ``branches`` times ``most``, the maximum cost of a branch; returns how many may begin.

        Waits while measured branches of earlier states run that may leave enough for all. These always end, since they
        do not fork; trained ones fork and may wait themselves, so they are not waited for.
        """
        while (number := self._fitting(most, branches)) < branches and self._measuring:
            await self._one_returns()
        self._taken += most * number
        return number

    async def begin(self) -> None:
        """Begin a measured branch; waits while ``at_once`` of them run."""
        while self._measuring >= self._at_once:
            await self._one_returns()
        self._measuring += 1

    async def _one_returns(self) -> None:
        self._returned.clear()
        await self._returned.wait()

    def give_back(self, most: Cost, spent: Cost, measured: bool) -> None:
        """A branch ended for which ``most`` was reserved, and which cost ``spent``."""
        self._taken -= most - spent
        self._measuring -= measured
        self._returned.set()

    def _fitting(self, most: Cost, branches: int) -> int:
        limits = ((self._tokens, self._taken.tokens, most.tokens), (self._steps, self._taken.steps, most.steps))
        room = [
            (limit - reserved) // per_branch
            for limit, reserved, per_branch in limits
            if limit is not None and per_branch > 0
        ]
        return max(0, min([branches, *room]))


class Allowance:
    """The trained branches that all rollouts of a group may begin together: first come, first served.

    Args:
        branches: how many; None: any number.
    """

    def __init__(self, branches: int | None = None) -> None:
        self._left = math.inf if branches is None else branches

    def take(self, branches: int) -> int:
        """Take ``branches``, or as many as remain; returns their number."""
        number = int(min(branches, self._left))
        self._left -= number
        return number

    def give_back(self, taken: int) -> None:
        """Return branches that did not begin after all."""
        self._left += taken


Node = tuple[int, int]
"""A state on a trajectory: the branch that played the step to it, and the number of the step from it."""


@dataclass
class Trajectory:
    """One course of an episode: its steps, and all that is needed to continue."""

    episode: Episode
    prompts: Prompts
    reader: ActionReader
    """knows the tools of its current state"""
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
    waiting: dict[Any, dict[str, Any]] = field(default_factory=dict)
    """role -> note and results of its last turn, until it moves again"""
    opponents: Opponents | None = None
    """who play the other roles; None: the policy plays all"""
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
        steps = [step.copied() for step in self.episode.steps]
        return replace(
            self,
            episode=Episode(steps, self.episode.task, self.episode.roles, self.episode.opening, branch=branch),
            opponents=self.opponents and self.opponents.fork(),
            prompts=self.prompts.fork(),
            turns=turns,
            environment=None,
            candidates=[],
            waiting={**self.waiting},
            trained=trained,
            begins=len(steps),
            made_by=[*self.made_by],
            spent=Cost(),
            most=most,
        )

    async def step(self, action: str) -> Answer:
        """One step of the environment."""
        self.spent += Cost(steps=1)
        return await self.environment.step(action)

    @property
    def mover(self) -> Any:
        """Whose move it is; where the state names no role, who moved last."""
        return self.episode.players[-1] if self.seen.role is None and self.episode.steps else self.seen.role

    def keeps_mover(self, answer: Answer) -> bool:
        """Whether the one whose move it is moves in the state ``answer`` as well."""
        return answer.role is None or self.mover in (None, answer.role)

    def add(self, step: PlayedStep, answer: Answer) -> None:
        """The next step, which led to the state ``answer``."""
        for paid in ("rewards", "outcome"):  # the step has it: a turn that is not applied leads to this state again
            answer.info.pop(paid, None)
        seen = answer if self.keeps_mover(answer) else self._handed_over(answer)
        self.episode.steps.append(step)
        self.made_by.append(self.episode.branch)
        self.seen = seen

    def _handed_over(self, answer: Answer) -> Answer:
        """What the role that moves next sees: the note and the results of a turn wait for the role that took it."""
        private = ("note", "results")
        self.waiting[self.mover] = {name: answer.info[name] for name in private if name in answer.info}
        info = {name: value for name, value in answer.info.items() if name not in private}
        info |= self.waiting.pop(answer.role, {})
        if results := info.get("results"):
            content = f"{results[-1]['content']}\n{answer.observation}".strip()
            info["results"] = [*results[:-1], {**results[-1], "content": content}]
        return replace(answer, info=info)

    def node(self, t: int) -> Node:
        """The state before step ``t``."""
        return (self.made_by[t - 1] if t else 0, t)

    def end(self, cut: bool) -> None:
        """End the episode here; ``cut``: it is truncated unless the environment ended it."""
        self.episode.end(self.seen.info["success"])
        self.episode.steps[-1].record["truncated"] = self.seen.truncated or (cut and not self.seen.terminated)

    def trade(self, other: Trajectory) -> None:
        """Exchange the last turns, taken from the same state, and their outcomes."""
        steps, other_steps = self.episode.steps, other.episode.steps
        steps[-1], other_steps[-1] = other_steps[-1], steps[-1]
        self.prompts, other.prompts = other.prompts, self.prompts
        self.reader, other.reader = other.reader, self.reader
        self.seen, other.seen = other.seen, self.seen
        self.waiting, other.waiting = other.waiting, self.waiting
        self.opponents, other.opponents = other.opponents, self.opponents
        self.environment, other.environment = other.environment, self.environment


def _future() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


@dataclass(frozen=True)
class Candidate:
    """A branch that is one candidate of several for a turn."""

    branch: Trajectory
    played: asyncio.Future[bool] = field(default_factory=_future)
    """whether it did not fail"""
    decided: asyncio.Future[None] = field(default_factory=_future)
    """done when one candidate has been chosen"""


FAILURES = (EnvironmentFailure, PromptError, PromptTooLongError, RewardError, SummaryError, TaskFormatError)
"""errors that end an episode or a branch, but not the run"""
NOTHING: dict[str, float] = dict.fromkeys(
    ("forks", "trained", "measured", "failed", "trained_tokens", "trained_steps", "measured_tokens", "measured_steps"),
    0.0,
)
"""a rollout's branch metrics before its first branch"""


class Branching:
    """The branches of one rollout.

    Args:
        allowance: the trained branches that its group has left.
        walk: plays a trajectory to its end, forking it if it is trained.
        reward: composes the rewards of an episode that has ended.
        score: the composed reward of the last step so far.
        ask: queries the model at the end of a trajectory.
        failed: called with the reason why a branch failed.
    """

    def __init__(
        self,
        strategy: Strategy,
        budget: Budget,
        allowance: Allowance,
        walk: Callable[[Trajectory, Branching], Awaitable[None]],
        reward: Callable[[Episode], Awaitable[None]],
        score: Callable[[Episode], Awaitable[float]],
        ask: Callable[[Trajectory, Ask], Awaitable[float]],
        failed: Callable[[str], None],
    ) -> None:
        self._strategy, self._budget, self._allowance = strategy, budget, allowance
        self._doubt: Callable[[ForkPoint, Generated], Fork | None] | None = getattr(strategy, "doubt", None)
        self._choose: Callable[[Sequence[float]], int] | None = getattr(strategy, "choose", None)
        self._walk, self._reward, self._score, self._ask, self._failed = walk, reward, score, ask, failed
        self._playing: list[asyncio.Task[None]] = []
        self._clones: list[asyncio.Task[Any]] = []
        self._branches = 0
        self._ended: list[Trajectory] = []
        self._returns: dict[Node, list[float]] = {}
        self._counts = dict(NOTHING)

    async def at(self, trajectory: Trajectory) -> None:
        """Fork ``trajectory``, whose next prompt is ready, or query the model there, if the strategy says so."""
        if (point := self._fork_point(trajectory)) is None:
            return
        action = self._strategy.fork(point)
        if isinstance(action, Ask):
            await self._begin_queries(trajectory, action)
        elif action is not None:
            await self._begin_branches(trajectory, action, point.turn)

    async def written(self, trajectory: Trajectory, turn: Generated) -> None:
        """Fork ``trajectory`` before a written turn that is not played yet; branches write another one."""
        if self._doubt is None or (point := self._fork_point(trajectory)) is None:
            return
        if (fork := self._doubt(point, turn)) is not None:
            await self._begin_branches(trajectory, fork, point.turn)

    def _fork_point(self, trajectory: Trajectory) -> ForkPoint | None:
        """The next fork point of a trajectory; None at its own beginning, where its parent forked already."""
        episode, t = trajectory.episode, len(trajectory.episode.steps)
        return None if t == trajectory.begins else ForkPoint(t, episode.branch, trajectory.depth, episode.steps)

    async def _begin_queries(self, trajectory: Trajectory, ask: Ask) -> None:
        most = Cost(tokens=ask.tokens)
        number = await self._budget.reserve(most, ask.times)
        for _ in range(number):
            await self._budget.begin()
            branch = trajectory.fork(trajectory.episode.branch, trained=False, turns=trajectory.turns, most=most)
            self._playing.append(asyncio.create_task(self._play(branch, lambda b: self._ask(b, ask))))
        self._counts["forks"] += number > 0

    async def _begin_branches(self, trajectory: Trajectory, fork: Fork, t: int) -> None:
        turns = trajectory.turns if fork.turns is None else min(trajectory.turns, t + fork.turns)
        most = Cost((turns - t) * trajectory.sampling["max_tokens"], turns - t)
        depth, clones = trajectory.depth + fork.trained, []
        allowed = self._allowance.take(fork.branches) if fork.trained else fork.branches
        number = await self._budget.reserve(most, allowed)
        if fork.trained:
            self._allowance.give_back(allowed - number)
        for _ in range(number):
            if not fork.trained:
                await self._budget.begin()
            self._branches += fork.trained
            branch_number = self._branches if fork.trained else trajectory.episode.branch
            branch = trajectory.fork(branch_number, fork.trained, turns, most)
            branch.depth = depth
            clones.append(asyncio.ensure_future(trajectory.environment.clone()))
            self._clones.append(clones[-1])
            course = partial(self._to_its_end, clones[-1])
            if self._choose is not None:
                trajectory.candidates.append(Candidate(branch))
                course = partial(self._to_the_choice, clones[-1], trajectory.candidates[-1])
            self._playing.append(asyncio.create_task(self._play(branch, course)))
        if clones:
            trajectory.depth = depth
            self._counts["forks"] += 1
            await asyncio.wait(clones)  # the state must not change until then

    async def chosen(self, trajectory: Trajectory) -> None:
        """Choose among the candidates for the turn that ``trajectory`` has just taken; the others end there.

        All are scored under the same conditions: as if the episode had been cut after the turn.
        """
        t = len(trajectory.episode.steps) - 1
        if self._choose is None or t == trajectory.begins:
            return
        candidates = [candidate for candidate in trajectory.candidates if await candidate.played]
        trajectory.candidates = []
        trajectory.end(cut=True)
        trajectories = [trajectory, *(candidate.branch for candidate in candidates)]
        scores = await asyncio.gather(*(self._score(path.episode) for path in trajectories), return_exceptions=True)
        if isinstance(scores[0], BaseException):
            raise scores[0]
        for candidate, score in zip(candidates, scores[1:], strict=True):
            if isinstance(score, BaseException):
                candidate.decided.set_exception(score)
        scored = [(path, score) for path, score in zip(trajectories, scores, strict=True) if isinstance(score, float)]
        for path, score in scored:
            path.episode.steps[-1].record["extra"][SCORE] = score
        winner, _ = scored[self._choose([score for _, score in scored])]
        if winner is not trajectory:
            trajectory.trade(winner)
            winner.end(cut=True)
        trajectory.end(cut=t + 1 == trajectory.turns)
        for candidate in candidates:
            if not candidate.decided.done():
                candidate.decided.set_result(None)

    async def finished(self) -> None:
        """Wait for all branches."""
        while playing := [task for task in self._playing if not task.done()]:
            ended, _ = await asyncio.wait(playing, return_when=asyncio.FIRST_EXCEPTION)
            for task in ended:
                task.result()
        for task in self._playing:  # some ended earlier
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

    async def _to_its_end(self, clone: asyncio.Task[Any], branch: Trajectory) -> float:
        """Play ``branch``; the return from the fork on, of the role that moved there."""
        branch.environment = await clone
        await self._walk(branch, self)
        await self._reward(branch.episode)
        steps = branch.episode.steps[branch.begins :]
        roles = branch.episode.players[branch.begins :]
        return float(sum(s.record["composed_reward"] for s, role in zip(steps, roles, strict=True) if role == roles[0]))

    async def _to_the_choice(self, clone: asyncio.Task[Any], candidate: Candidate, branch: Trajectory) -> float:
        """The same of a candidate: it waits until one is chosen, and may have the turn of another one then."""
        well = False
        try:
            branch.environment = await clone
            await self._walk(branch, self)
            well = True
        finally:
            self._give_back(branch)  # the next turn's candidates may need it
            candidate.played.set_result(well)
        await candidate.decided
        branch.environment.close()  # the loser's; a judge may take its time
        await self._reward(branch.episode)
        return 0.0

    def _give_back(self, branch: Trajectory) -> None:
        """Return the part of the reserved cost that ``branch`` did not need."""
        self._budget.give_back(branch.most, branch.spent, measured=not branch.trained)
        branch.most = branch.spent

    async def _play(self, branch: Trajectory, course: Callable[[Trajectory], Awaitable[float]]) -> None:
        kind = "trained" if branch.trained else "measured"
        try:
            value = await course(branch)
        except FAILURES as error:
            self._counts["failed"] += 1
            self._failed(f"{type(error).__name__}: {error}")
        else:
            self._counts[kind] += 1
            if branch.trained:
                self._ended.append(branch)
            else:
                self._returns.setdefault(branch.node(branch.begins), []).append(value)
        finally:
            self._counts[f"{kind}_tokens"] += branch.spent.tokens
            self._counts[f"{kind}_steps"] += branch.spent.steps
            self._give_back(branch)  # else others would wait forever
            if branch.environment is not None:
                branch.environment.close()

    def episodes(self, trunk: Trajectory, session: str) -> list[Episode]:
        """The episode and its branches that have steps of their own, with the columns of their records.

        Each step belongs to one branch; steps of a failed branch belong to the first branch that continued from it.

        Args:
            trunk: the episode's own trajectory, whose rewards are composed, too.
            session: the number of the rollout in its group.
        """
        root = session if getattr(self._strategy, "roots", "shared") == "own" else "start"
        owner_of_step: dict[tuple[int, int], int] = {}
        episodes = []
        for trajectory in (trunk, *sorted(self._ended, key=lambda ended: ended.episode.branch)):
            episode, steps = trajectory.episode, trajectory.episode.steps
            owners = [owner_of_step.setdefault((made, t), episode.branch) for t, made in enumerate(trajectory.made_by)]
            if episode.branch not in owners:
                continue
            episode.owners, episode.branching = owners, self._counts
            rewards = [step.record["composed_reward"] for step in steps]
            nodes = [trajectory.node(t) for t in range(len(steps))]
            measured = [self._returns.get(node, []) for node in nodes]
            strategy_columns: dict[str, list[Any]] = {}
            players, outcome = episode.players, dict[Any, float]()
            for role in dict.fromkeys(players):
                taken = [t for t, player in enumerate(players) if player == role]
                outcome[role] = float(sum(rewards[t] for t in taken))
                of_role = self._strategy.columns([rewards[t] for t in taken], [measured[t] for t in taken])
                for name, values in of_role.items():
                    column = strategy_columns.setdefault(name, [0.0] * len(steps))
                    for t, value in zip(taken, values, strict=True):
                        column[t] = value
            columns = {
                "parent": [f"{session}.{branch}.{t}" if t else root for branch, t in nodes],
                "branch": [float(episode.branch)] * len(steps),
                "depth": [float(trajectory.depth)] * len(steps),
                "leaf_outcome": [outcome[player] for player in players],
                **strategy_columns,
            }
            for t, step in enumerate(steps):
                step.record["extra"] |= {name: values[t] for name, values in columns.items()}
            episodes.append(episode)
        return episodes
