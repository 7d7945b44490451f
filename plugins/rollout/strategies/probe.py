"""Values of states from short answers: what the model would answer now, or how probable the right answer is to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.rewards import Composition, right_answers
from verl_turnkey.envs.rewards.composition import compose_single
from verl_turnkey.plugins.rollout.strategies.registry import KEY, Ask, ForkPoint, QueriedState, register_strategy
from verl_turnkey.plugins.rollout.strategies.vine import values_of_states

TEXT = "The answer is "


@register_strategy(
    "probe",
    gives=("turn_value", "value_rollouts"),
    trains=False,
    clones=False,
    source="VSRM, arXiv:2508.10293; SPAE, arXiv:2601.03823",
    summary="values of states by short answers that the model is made to give there; with the method progress, alpha=0",
)
@dataclass(frozen=True)
class Probe:
    """Before a turn the model is prompted for K answers, and their mean reward is the state's value.

    ::

        V(t) = mean over K answers of reward(answer)            extra.turn_value, before step t

    An answer is what the model writes after ``text``, with which its turn begins. The method ``progress`` with
    ``alpha=0`` gives each step the change of V, as VSRM does, and the last one the rest of the episode's return. So
    ``reward`` should match the reward at the end of an episode. States without a query move no credit, as in ``vine``.
    """

    answers: int = 5
    """K: answers at each state; 5 in both papers"""
    tokens: int = 10
    """of an answer at most; 10 in SPAE, 768 in VSRM, whose answers come with a derivation"""
    text: str = TEXT
    """beginning of each answer, in the model's own turn; trailing spaces belong to the answer"""
    temperature: float = 0.6
    """of the answers; 0.6 in both papers"""
    stop: list[str] = field(default_factory=lambda: ["\n"])
    """what ends an answer, besides what ends a turn"""
    reward: dict[str, Any] = field(default_factory=lambda: {"name": "answer"})
    """reward of an answer: one component of turnkey.rewards, which sees it as an episode of one turn"""
    every: int = 1
    """query before turns 0, every, 2 every, ..."""

    def __post_init__(self) -> None:
        check(self.answers >= 1, "answers", "an integer >= 1", self.answers)
        check(self.tokens >= 1, "tokens", "an integer >= 1", self.tokens)
        check(self.temperature >= 0, "temperature", "a number >= 0", self.temperature)
        check(self.every >= 1, "every", "an integer >= 1", self.every)
        check(all(self.stop), "stop", "a list of strings that are not empty", self.stop)
        # An unknown component is an error at the start, and the parser puts its path in front.
        reward = compose_single(self.reward, "reward")
        check(reward.compares is None, "reward", "a component of one episode alone", self.reward)

    def fork(self, at: ForkPoint) -> Ask | None:
        return Ask(self.answers, self.tokens, self._value) if at.turn % self.every == 0 else None

    def columns(self, rewards: Sequence[float], measured: Sequence[Sequence[float]]) -> Mapping[str, Sequence[float]]:
        return values_of_states(rewards, measured)

    @property
    def needs_answer(self) -> bool:
        """Whether each value needs the right answer of the task."""
        return self.reward.get("name") == "answer"

    async def _value(self, state: QueriedState) -> float:
        answer = await state.write(self.text, self.tokens, self.temperature, self.stop)
        shaped = await self._reward.run([state.turn(self.text + answer.lstrip(" "), answer.strip())])
        return shaped.rewards[0]

    @cached_property
    def _reward(self) -> Composition:
        return compose_single(self.reward, f"{KEY}.reward")


@register_strategy(
    "probe_gold",
    gives=("turn_value", "value_rollouts", "gold_probability"),
    trains=False,
    clones=False,
    scores=True,
    source="IGPO, arXiv:2510.14967; the accuracy of SPAE, arXiv:2601.03823",
    summary="how probable the right answer is before each turn, by one call of the server; with information_gain",
)
@dataclass(frozen=True)
class ProbeGold:
    """Before a turn the server scores the probability of the right answer under the model.

    ::

        p(t) = exp(mean over the tokens of the answer of log p(token | history, text))      extra.gold_probability

    ``extra.turn_value`` is the same number. The right answer is the task's: see :func:`right_answers`; of several, the
    first. A state without a score has the probability of the one before it (at the start: of the one after it), so
    it adds no gain; without any score there is no gain at all.
    """

    text: str = TEXT
    """beginning of the answer, in the model's own turn; trailing spaces belong to the answer"""
    every: int = 1
    """score before turns 0, every, 2 every, ..."""
    needs_answer: ClassVar[bool] = True
    """each value needs the right answer of the task"""

    def __post_init__(self) -> None:
        check(self.every >= 1, "every", "an integer >= 1", self.every)

    def fork(self, at: ForkPoint) -> Ask | None:
        return Ask(1, 1, self._value) if at.turn % self.every == 0 else None

    def columns(self, rewards: Sequence[float], measured: Sequence[Sequence[float]]) -> Mapping[str, Sequence[float]]:
        last = next((values[0] for values in measured if values), 1.0)
        gold = [last := values[0] if values else last for values in measured]
        return {**values_of_states(rewards, measured), "gold_probability": gold}

    async def _value(self, state: QueriedState) -> float:
        right, *_ = right_answers(state.turn("", ""))
        return math.exp(await state.log_prob(self.text, right))
