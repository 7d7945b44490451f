"""Upper bounds on the trajectories, trained turns and measurements of a strategy, before anything is played."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from verl_turnkey.plugins.rollout.strategies.registry import Ask, Fork, ForkPoint, StrategySpec


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
    ask = _forks(spec, strategy)
    try:
        single = _most(ask, turns)
    except (_DependsOnTurns, RecursionError):
        single = Most(None, None, None) if spec.trains else Most(1, turns, None)
    branches = _least(None if single.trajectories is None else single.trajectories - 1, limits[1])
    of_branches = _least(None if single.turns is None else single.turns - turns, limits[1])
    if (total := getattr(strategy, "trajectories", None)) is not None:
        remaining = max(0, total - rollouts)
        branches = remaining if branches is None else min(remaining, rollouts * branches)
        of_branches = _least(remaining * (turns - getattr(strategy, "first", 0)), times(rollouts, of_branches))
    else:
        branches, of_branches = times(rollouts, branches), times(rollouts, of_branches)
    measured = single.measured
    if measured is not None and not spec.trains:
        measured = _within(ask, turns, tokens, limits)
    return Most(
        None if branches is None else rollouts + branches,
        None if of_branches is None else rollouts * turns + of_branches,
        times(rollouts, measured),
    )


def _most(ask: Callable[[ForkPoint], list[Fork | Ask]], turns: int) -> Most:
    """Bounds of one episode without limits: every trajectory plays all its turns and forks wherever it may."""

    @cache
    def walk(begins: int, depth: int, end: int) -> tuple[int, int, int]:
        trajectories, played, measured = 1, 0, 0
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
                    played += action.branches * below[1]
                    measured += action.branches * below[2]
            played += 1
        return trajectories, played, measured

    return Most(*walk(-1, 0, turns))


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


def _least(*numbers: int | None) -> int | None:
    return min((number for number in numbers if number is not None), default=None)


def times(number: int, count: int | None) -> int | None:
    """``count``, which may be unknown, times ``number``."""
    return None if count is None else number * count
