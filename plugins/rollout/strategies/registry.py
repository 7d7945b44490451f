"""Strategies by name: a frozen dataclass of parameters with two methods, and one decorator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.params import did_you_mean, parse, require_frozen

if TYPE_CHECKING:
    from verl_turnkey.plugins.rollout.episode import PlayedStep

KEY = "turnkey.rollout.strategy"
INDEPENDENT = "independent"
"""no strategy: episodes do not fork"""
BRANCH_COLUMNS = ("parent", "branch", "depth", "leaf_outcome")
"""columns of every step of an episode that may fork, whatever its strategy"""


@dataclass(frozen=True)
class Place:
    """Where an episode, or a trained branch of it, is before a turn."""

    turn: int
    """number of the turn that comes next, from 0"""
    branch: int
    """0: the episode itself"""
    depth: int
    """forks with trained branches on the way here"""
    steps: Sequence[PlayedStep]
    """what was played on the way here, with the ids and log-probabilities of each turn"""


@dataclass(frozen=True)
class Fork:
    """What to begin at a place; the episode itself goes on in any case."""

    branches: int
    """how many to begin, fewer where the budget or the environment allows fewer"""
    trained: bool
    """their own turns become rows, and they may fork as well; else only their returns are measured"""
    turns: int | None = None
    """after which a branch is truncated; null: played to its end"""


class Strategy(Protocol):
    """Its fields are the parameters that a configuration may set. It keeps nothing of an episode.

    Two fields mean the same in all strategies that have them: ``turns``, after which a branch is cut at the latest, and
    ``roots``, "own" where each rollout is a tree of its own (else the first turns of a group are siblings).
    """

    def fork(self, at: Place) -> Fork | None:
        """Asked before each turn of the episode and of its trained branches; None: go on without a fork."""

    def columns(self, rewards: Sequence[float], measured: Sequence[Sequence[float]]) -> Mapping[str, Sequence[Any]]:
        """The columns that it gives, one entry per step of a path from the start to an end.

        ``rewards``: composed, of each step. ``measured``: for each step the returns, from that step on, of the measured
        branches that began before it.
        """


@dataclass(frozen=True)
class StrategySpec:
    """A registered strategy: its class, the columns ``extra.<name>`` it gives, where it is from and what it does.

    ``trains``: whether branches of it may be trained.
    """

    name: str
    cls: type
    gives: tuple[str, ...]
    source: str
    summary: str
    trains: bool = True


_STRATEGIES: dict[str, StrategySpec] = {}
_C = TypeVar("_C", bound=type)


def register_strategy(
    name: str, *, gives: tuple[str, ...] = (), trains: bool = True, source: str = "", summary: str = ""
) -> Callable[[_C], _C]:
    """Decorate a frozen dataclass with the methods of :class:`Strategy` to make it the strategy ``name``.

    ``trains=False``: all branches of it are measured only.

    Raises:
        ValueError: the name is taken, or what is decorated is no frozen dataclass.
    """
    if name == INDEPENDENT or name in _STRATEGIES:
        raise ValueError(f"strategy {name!r} is there already; choose another name")
    if clash := {*gives} & {*BRANCH_COLUMNS}:
        raise ValueError(f"strategy {name!r}: every strategy gives the column {min(clash)!r}; choose another name")

    def register(cls: _C) -> _C:
        require_frozen(f"strategy {name!r}", cls)
        _STRATEGIES[name] = StrategySpec(name, cls, tuple(gives), source, summary, trains)
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
            f"{KEY}: there is no strategy {name!r}{did_you_mean(name, known) or '.'} There are {', '.join(known)}; one "
            "of your own is registered by a module of turnkey.modules"
        )
    spec = _STRATEGIES[name]
    return spec, parse(spec.cls, entry, KEY)
