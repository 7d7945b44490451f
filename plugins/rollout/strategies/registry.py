"""Strategies by name: a frozen dataclass of parameters with two methods, and one decorator."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

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
"""column of every step where a strategy chooses: the composed reward of the turn, before it was known what followed"""


@dataclass(frozen=True)
class ForkPoint:
    """Where an episode, or a trained branch of it, is before a turn."""

    turn: int
    """number of the turn that comes next, from 0"""
    branch: int
    """0: the episode itself"""
    depth: int
    """forks with trained branches on the way here"""
    steps: Sequence[PlayedStep]
    """what was played on the way here, with the ids and log-probabilities of each turn"""


Place = ForkPoint
"""former name, which strategies of users may import"""


@dataclass(frozen=True)
class Fork:
    """What to begin at a fork point; the episode itself goes on in any case."""

    branches: int
    """how many to begin, fewer where the budget or the environment allows fewer"""
    trained: bool
    """their own turns become rows, and they may fork as well; else only their returns are measured"""
    turns: int | None = None
    """after which a branch is truncated; null: played to its end"""


class QueriedState(Protocol):
    """The state before a turn, and the model that would take it."""

    def turn(self, text: str, action: str) -> RewardStep:
        """The turn as rewards would see it if the model had written ``text``, and the episode ended with it."""
        raise NotImplementedError

    async def write(self, begun: str, tokens: int, temperature: float, stop: Sequence[str]) -> str:
        """How the model goes on with a turn that begins with ``begun``, up to the first of ``stop``."""
        raise NotImplementedError

    async def log_prob(self, begun: str, text: str) -> float:
        """Mean log-probability of the tokens of ``text`` in a turn that begins with ``begun``.

        Raises:
            RewardError: the server gives none.
        """
        raise NotImplementedError


Asked = QueriedState
"""former name, which strategies of users may import"""


@dataclass(frozen=True)
class Ask:
    """A query of the model at a fork point. The episode goes on, nothing is trained, and no environment is cloned."""

    times: int
    """how often, fewer where the budget allows fewer"""
    tokens: int
    """that the model may write each time"""
    value: Callable[[QueriedState], Awaitable[float]]
    """what the state is worth by one answer; its errors are those of a reward"""


class Strategy(Protocol):
    """Its fields are the parameters that a configuration may set. It keeps nothing of an episode.

    Three fields mean the same in all strategies that have them: ``turns``, after which a branch is cut at the latest;
    ``roots``, "own" where each rollout is a tree of its own (else the first turns of a group are siblings); and
    ``trajectories``, the rollouts and trained branches of a group at most.

    A method ``doubt(at, turn) -> Fork | None`` is optional. It is asked as ``fork`` is, when the turn is written and
    not yet played: its branches write another one in the same state.

    A property ``clones_at_once`` says how many branches of an episode, those of its branches included, are open at the
    same time at most; ``turnkey.env.instances_per_host=auto`` leaves memory for them. Its default:
    :func:`most_clones`.

    With a method ``choose(scores) -> int`` the branches of a fork, which must have ``turns=1``, are candidates for the
    next turn, as is the trajectory itself. It returns the number of the score with which the trajectory goes on; the
    first score is the trajectory's own. The strategy gives the column ``candidate_score``.

    With an attribute ``needs_answer`` that is true, a first task without a right answer is refused before the run
    starts; strings in an attribute ``stop`` are what it has answers end with.
    """

    def fork(self, at: ForkPoint) -> Fork | Ask | None:
        """Asked before each turn of the episode and of its trained branches; None: go on without either."""

    def columns(self, rewards: Sequence[float], measured: Sequence[Sequence[float]]) -> Mapping[str, Sequence[Any]]:
        """The columns that it gives, one entry per step of a trajectory from the start to an end.

        ``rewards``: composed, of each step. ``measured``: for each step the returns, from that step on, of the measured
        branches that began before it, or the values by what the model was asked there.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class StrategySpec:
    """A registered strategy: its class, the columns ``extra.<name>`` it gives, where it is from and what it does.

    ``trains``: whether branches of it may be trained. ``clones``: whether it forks; else it only asks the model.
    ``scores``: whether it asks for log-probabilities. ``log_probs``: whether it reads those of turns.
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

    ``trains=False``: all branches of it are measured only. ``clones=False``: it has none, and asks the model alone.
    ``scores=True``: it asks for log-probabilities, which not every server gives. ``log_probs=True``: it reads those of
    turns, so that a run without them is refused.

    Raises:
        ValueError: the name is taken, or what is decorated is no frozen dataclass.
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
        known = [INDEPENDENT, *strategies()]
        raise ConfigError(
            f"{KEY}: there is no strategy {name!r}{known_as(name) or did_you_mean(name, known) or '.'} There are "
            f"{', '.join(known)}; one of your own is registered by a module of turnkey.modules"
        )
    spec = _STRATEGIES[name]
    return spec, parse(spec.cls, entry, KEY)


def most_clones(spec: StrategySpec, strategy: Any, rollouts: int, measured: int) -> int:
    """Clones of an episode that are open at the same time: at most, or on average where its group shares them.

    Without a property ``clones_at_once``: the part of an episode in those of its group (``trajectories``), else one if
    they are trained and ``measured`` if not.

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
