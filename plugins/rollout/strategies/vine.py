"""VinePPO: the value of a state is the mean return of fresh rollouts from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from verl_turnkey.advantage.params import check
from verl_turnkey.plugins.rollout.strategies.registry import Fork, ForkPoint, register_strategy


@register_strategy(
    "vine",
    gives=("turn_value", "value_rollouts"),
    trains=False,
    source="VinePPO, arXiv:2410.01679",
    summary="values of states by fresh rollouts from them, which are not trained; with the method progress, alpha=0",
)
@dataclass(frozen=True)
class Vine:
    """From the state before a turn K rollouts go on to their end, and their mean return is its value.

    ::

        V(t) = mean over K rollouts of r(t) + r(t+1) + ...      extra.turn_value, before step t

    The method ``progress`` with ``alpha=0`` makes VinePPO's advantage of it, r(t) + V(t+1) - V(t).

    A state that was not measured (``every``, the budget, branches that failed) is given the value with which the steps
    between it and the last measured state get no credit: V(t) = V(t-1) - r(t-1); before the first measured one
    V(t) = r(t) + V(t+1), and after the end 0. So the step that leads to the next measured state has the credit of all
    steps since the last one, and the sum over an episode stays its return minus V(0). ``progress`` gives it to each of
    them (``segments``).
    """

    rollouts: int = 9
    """K: rollouts from each measured state; 9 in the paper, which also tried 3 and 1"""
    every: int = 1
    """measure the states before turns 0, every, 2 every, ...; 1: all, as in the paper"""
    turns: int | None = None
    """turns after which a rollout is cut, with the return so far; null: played to its end, as in the paper"""

    def __post_init__(self) -> None:
        check(self.rollouts >= 1, "rollouts", "an integer >= 1", self.rollouts)
        check(self.every >= 1, "every", "an integer >= 1", self.every)
        check(self.turns is None or self.turns >= 1, "turns", "null or an integer >= 1", self.turns)

    def fork(self, at: ForkPoint) -> Fork | None:
        return Fork(self.rollouts, trained=False, turns=self.turns) if at.turn % self.every == 0 else None

    def columns(self, rewards: Sequence[float], measured: Sequence[Sequence[float]]) -> Mapping[str, Sequence[float]]:
        return values_of_states(rewards, measured)


def values_of_states(rewards: Sequence[float], measured: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """``turn_value`` and ``value_rollouts`` from what was measured before each step, by the rule of :class:`Vine`."""
    values: list[float | None] = [fmean(returns) if returns else None for returns in measured]
    for t in range(1, len(values)):
        if values[t] is None and (before := values[t - 1]) is not None:
            values[t] = before - rewards[t - 1]
    after, whole = 0.0, []
    for value, reward in zip(reversed(values), reversed(rewards), strict=True):
        after = reward + after if value is None else value
        whole.append(after)
    return {"turn_value": whole[::-1], "value_rollouts": [float(len(returns)) for returns in measured]}
