"""Strategies by name, a frozen dataclass of parameters with two methods and one decorator; and upper bounds of each."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.paper_names import known_as
from verl_turnkey.advantage.params import did_you_mean, parse, require_frozen

if TYPE_CHECKING:
    from verl_turnkey.envs.rewards import RewardStep
    from verl_turnkey.plugins.rollout.episode import PlayedStep

KEY = "turnkey.rollout.strategy"
INDEPENDENT = "independent"
"""no strategy: episodes do not fork"""
BRANCH_COLUMNS = ("parent", "branch", "depth", "leaf_outcome")
"""columns of every step of an episode that may fork, whatever its strategy"""
SCORE = "candidate_score"
"""column of every step if a strategy chooses: the composed reward of the turn, as if the episode had ended there"""


@dataclass(frozen=True)
class ForkPoint:
    """The position of an episode, or of a trained branch, before a turn."""

    turn: int
    """number of the next turn, from 0"""
    branch: int
    """0: the episode itself"""
    depth: int
    """forks with trained branches on the way here"""
    steps: Sequence[PlayedStep]
    """the steps on the way here, with the ids and log-probabilities of each turn"""


@dataclass(frozen=True)
class Fork:
    """What to begin at a fork point; the episode itself continues in any case."""

    branches: int
    """how many to begin; fewer if the budget or the environment allows fewer"""
    trained: bool
    """True: their turns become rows, and they may fork, too; False: only their returns are measured"""
    turns: int | None = None
    """number of turns after which a branch is truncated; null: played to its end"""


class QueriedState(Protocol):
    """The state before a turn, and the model that takes turns."""

    def turn(self, text: str, action: str) -> RewardStep:
        """The turn as rewards would see it if the model had written ``text`` and the episode ended there."""
        raise NotImplementedError

    async def write(self, begun: str, tokens: int, temperature: float, stop: Sequence[str]) -> str:
        """How the model continues a turn that begins with ``begun``, up to the first of ``stop``."""
        raise NotImplementedError

    async def log_prob(self, begun: str, text: str) -> float:
        """Mean log-probability of the tokens of ``text`` in a turn that begins with ``begun``.

        Raises:
            RewardError: the server gives none.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Ask:
    """A query of the model at a fork point. The episode continues; nothing is trained, no environment is cloned."""

    times: int
    """number of queries; fewer if the budget allows fewer"""
    tokens: int
    """maximum tokens of each answer"""
    value: Callable[[QueriedState], Awaitable[float]]
    """the value of the state from one answer; its errors are those of a reward"""


class Strategy(Protocol):
    """Its fields are the parameters that a configuration may set. It keeps no state of an episode.

    Three fields have the same meaning in all strategies: ``turns``, after which a branch is cut at the latest;
    ``roots``, "own" if each rollout is a tree of its own (else the first turns of a group are siblings); and
    ``trajectories``, the maximum number of rollouts and trained branches of a group.

    A method ``doubt(at, turn) -> Fork | None`` is optional. It is called like ``fork``, but once the turn is written
    and not yet played: its branches write another turn in the same state.

    A property ``clones_at_once`` is the maximum number of branches of an episode, including their own branches, that
    are open at the same time; ``turnkey.env.instances_per_host=auto`` leaves memory for them. Its default:
    :func:`most_clones`.

    With a method ``choose(scores) -> int`` the branches of a fork, which must have ``turns=1``, are candidates for the
    next turn, as is the trajectory itself. It returns the index of the score with which the trajectory continues; the
    first score is the trajectory's own. The strategy adds the column ``candidate_score``.

    If an attribute ``needs_answer`` is true, a first task without a right answer is refused before the run starts;
    strings in an attribute ``stop`` end its answers.
    """

    def fork(self, at: ForkPoint) -> Fork | Ask | None:
        """Called before each turn of the episode and of its trained branches; None: continue without either."""

    def columns(self, rewards: Sequence[float], measured: Sequence[Sequence[float]]) -> Mapping[str, Sequence[Any]]:
        """The columns that it adds, one entry per step of a complete trajectory.

        ``rewards``: the composed reward of each step. ``measured``: for each step the returns, from that step on, of
        the measured branches that began before it, or the values from queries there.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class StrategySpec:
    """A registered strategy: its class, the columns ``extra.<name>`` it adds, its source and a summary.

    ``trains``: whether its branches may be trained. ``clones``: whether it forks; else it only queries the model.
    ``scores``: whether it requests log-probabilities. ``log_probs``: whether it reads those of turns.
    """

    name: str
    cls: type
    gives: tuple[str, ...]
    source: str
    summary: str
    trains: bool = True
    clones: bool = True
    scores: bool = False
    log_probs: bool = False


_STRATEGIES: dict[str, StrategySpec] = {}
_C = TypeVar("_C", bound=type)


def register_strategy(
    name: str,
    *,
    gives: tuple[str, ...] = (),
    trains: bool = True,
    clones: bool = True,
    scores: bool = False,
    log_probs: bool = False,
    source: str = "",
    summary: str = "",
) -> Callable[[_C], _C]:
    """Decorate a frozen dataclass with the methods of :class:`Strategy` to make it the strategy ``name``.

    ``trains=False``: its branches are only measured. ``clones=False``: it has no branches and only queries the model.
    ``scores=True``: it requests log-probabilities, which not every server gives. ``log_probs=True``: it reads those of
    turns, so a run without them is refused.

    Raises:
        ValueError: the name is taken, or the class is not a frozen dataclass.
    """
    if name == INDEPENDENT or name in _STRATEGIES:
        raise ValueError(f"strategy {name!r} is there already; choose another name")
    if clash := {*gives} & {*BRANCH_COLUMNS}:
        raise ValueError(f"strategy {name!r}: every strategy gives the column {min(clash)!r}; choose another name")

    def register(cls: _C) -> _C:
        require_frozen(f"strategy {name!r}", cls)
        _STRATEGIES[name] = StrategySpec(name, cls, tuple(gives), source, summary, trains, clones, scores, log_probs)
        return cls

    return register


def strategies() -> dict[str, StrategySpec]:
    """All registered strategies by name, sorted."""
    return dict(sorted(_STRATEGIES.items()))


def read_strategy(value: str | Mapping[str, Any]) -> tuple[StrategySpec, Any] | None:
    """The strategy that ``turnkey.rollout.strategy`` selects, with its parameters; None: episodes do not fork.

    Raises:
        ConfigError: an unknown strategy (with the closest match), or a parameter that does not fit.
    """
    entry = dict(value) if isinstance(value, Mapping) else {"name": value}
    name = entry.pop("name", None)
    if name == INDEPENDENT and not entry:
        return None
    if name not in _STRATEGIES:
        names = [INDEPENDENT, *strategies()]
        raise ConfigError(
            f"{KEY}: there is no strategy {name!r}{known_as(name) or did_you_mean(name, names) or '.'} There are "
            f"{', '.join(names)}; one of your own is registered by a module of turnkey.modules"
        )
    spec = _STRATEGIES[name]
    return spec, parse(spec.cls, entry, KEY)


def most_clones(spec: StrategySpec, strategy: Any, rollouts: int, measured: int) -> int:
    """Clones of an episode that are open at the same time: at most, or on average if its group shares them.

    Without a property ``clones_at_once``: the episode's share of its group's (``trajectories``), else one if they are
    trained and ``measured`` if not.

    Args:
        rollouts: of a group.
        measured: branches of an episode that may be measured at the same time.
    """
    if not spec.clones:
        return 0
    if (most := getattr(strategy, "clones_at_once", None)) is not None:
        return int(most)
    total = getattr(strategy, "trajectories", None)
    if total is not None:
        return math.ceil(max(0, total - rollouts) / rollouts)
    return 1 if spec.trains else measured


@dataclass(frozen=True)
class Most:
    """Upper bounds; None: unknown, since the strategy decides by what was played."""

    trajectories: int | None = 1
    """trained trajectories, including the rollout itself"""
    turns: int | None = 0
    """their turns, each of which is trained once"""
    measured: int | None = 0
    """branches and queries of the model that only measure a state"""


class _DependsOnTurns(Exception):
    pass


class _Unknown(Sequence[Any]):
    """A sequence of turns of which only the number is known."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, _: Any) -> NoReturn:
        raise _DependsOnTurns


def most_of_group(
    spec: StrategySpec, strategy: Any, rollouts: int, turns: int, *, tokens: int, limits: tuple[int | None, int | None]
) -> Most:
    """Upper bounds of a group of ``rollouts`` episodes of at most ``turns`` turns with at most ``tokens`` tokens each.

    ``limits``: tokens and steps of all branches of an episode, as ``branch_tokens`` and ``branch_steps`` set them.
    """
    ask, steps = _forks(spec, strategy), math.inf if limits[1] is None else limits[1]
    try:
        trajectories, all_turns, measured = _most(ask, turns)
    except (_DependsOnTurns, RecursionError):
        trajectories, all_turns, measured = (math.inf, math.inf, math.inf) if spec.trains else (1, turns, math.inf)
    branches, of_branches = rollouts * min(trajectories - 1, steps), rollouts * min(all_turns - turns, steps)
    if (total := getattr(strategy, "trajectories", None)) is not None:
        remaining = max(0, total - rollouts)
        branches = min(remaining, branches)
        of_branches = min(remaining * (turns - getattr(strategy, "first", 0)), of_branches)
    if measured != math.inf and not spec.trains:
        measured = _within(ask, turns, tokens, limits)
    bounds = rollouts + branches, rollouts * turns + of_branches, rollouts * measured
    return Most(*(bound if isinstance(bound, int) else None for bound in bounds))  # those that are unknown are floats


def _most(ask: Callable[[ForkPoint], list[Fork | Ask]], turns: int) -> tuple[float, float, float]:
    """Bounds of one episode without limits: every trajectory plays all its turns and forks wherever it may."""

    @cache
    def walk(begins: int, depth: int, end: int) -> tuple[int, int, int]:
        trajectories, played_turns, measured = 1, 0, 0
        for t in range(max(0, begins), end):
            for action in ask(ForkPoint(t, int(begins >= 0), depth, _Unknown(t))) if t != begins else ():
                if isinstance(action, Ask):
                    measured += action.times
                elif not action.trained:
                    measured += action.branches
                elif action.branches:
                    depth += 1
                    below = walk(t, depth, end if action.turns is None else min(end, t + action.turns))
                    trajectories += action.branches * below[0]
                    played_turns += action.branches * below[1]
                    measured += action.branches * below[2]
            played_turns += 1
        return trajectories, played_turns, measured

    return walk(-1, 0, turns)


def _forks(spec: StrategySpec, strategy: Any) -> Callable[[ForkPoint], list[Fork | Ask]]:
    """What a strategy begins at a fork point; if it decides by the written turn, the most that it may begin."""
    doubts = hasattr(strategy, "doubt")
    branches = getattr(strategy, "branches", 0) - 1 if spec.trains else getattr(strategy, "rollouts", -1)
    first = getattr(strategy, "first", 0)

    def ask(at: ForkPoint) -> list[Fork | Ask]:
        fork = strategy.fork(at)
        begun = [] if fork is None else [fork]
        if doubts and at.turn >= first:
            if branches < 0:
                raise _DependsOnTurns
            begun.append(Fork(branches, spec.trains, getattr(strategy, "turns", None)))
        return begun

    return ask


def _within(
    ask: Callable[[ForkPoint], list[Fork | Ask]], turns: int, tokens: int, limits: tuple[int | None, int | None]
) -> int:
    """How many measurements of one episode the limits allow.

    A state may begin as many as fit at their maximum cost; afterwards each has taken at least a step and a token (an
    answer to a query: perhaps none). Fewer at one state never allow more in total, so this is an upper bound.
    """
    begun = 0
    for t in range(turns):
        for action in ask(ForkPoint(t, 0, 0, _Unknown(t))):
            query = isinstance(action, Ask)
            ahead = 0 if query else min(turns - t, action.turns or turns)
            needs = (action.tokens if query else ahead * tokens, ahead)
            room = [
                (limit - (0 if query else begun)) // need
                for limit, need in zip(limits, needs, strict=True)
                if limit is not None and need
            ]
            begun += max(0, min([action.times if query else action.branches, *room]))
    return begun


def times(number: int, count: int | None) -> int | None:
    """``count``, which may be unknown, times ``number``."""
    return None if count is None else number * count
