"""The strategies of this package."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from verl_turnkey.advantage.params import AtLeastOne, Finite, NotNegative, PositiveUnit, Range, Ranged, check
from verl_turnkey.envs.rewards import Composition, right_answers
from verl_turnkey.envs.rewards.composition import compose_single
from verl_turnkey.plugins.rollout.strategies.registry import (
    KEY,
    SCORE,
    Ask,
    Fork,
    ForkPoint,
    QueriedState,
    register_strategy,
)

if TYPE_CHECKING:
    from verl_turnkey.plugins.rollout.episode import Generated

AtLeastTwo = Annotated[int, Range(lambda x: x >= 2, "an integer >= 2")]


def values_of_states(rewards: Sequence[float], measured: Sequence[Sequence[float]]) -> dict[str, list[float]]:
    """``turn_value`` and ``value_rollouts``, computed as :class:`Vine` says from the returns measured at each state."""
    values: list[float | None] = [fmean(returns) if returns else None for returns in measured]
    for t in range(1, len(values)):
        if values[t] is None and (before := values[t - 1]) is not None:
            values[t] = before - rewards[t - 1]
    after, whole = 0.0, []
    for value, reward in zip(reversed(values), reversed(rewards), strict=True):
        after = reward + after if value is None else value
        whole.append(after)
    return {"turn_value": whole[::-1], "value_rollouts": [float(len(returns)) for returns in measured]}


def no_columns(rewards: Sequence[float], measured: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The columns of a strategy that adds none, or that added them when it chose."""
    return {}


@register_strategy(
    "vine",
    gives=("turn_value", "value_rollouts"),
    trains=False,
    source="VinePPO, arXiv:2410.01679",
    summary="values of states by fresh rollouts from them, which are not trained; with the method progress, alpha=0",
)
@dataclass(frozen=True)
class Vine(Ranged):
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

    rollouts: AtLeastOne = 9
    """K: rollouts from each measured state; 9 in the paper, which also tried 3 and 1"""
    every: AtLeastOne = 1
    """measure the states before turns 0, every, 2 every, ...; 1: all, as in the paper"""
    turns: AtLeastOne | None = None
    """turns after which a rollout is cut, with the return so far; null: played to its end, as in the paper"""

    def fork(self, at: ForkPoint) -> Fork | None:
        return Fork(self.rollouts, trained=False, turns=self.turns) if at.turn % self.every == 0 else None

    columns = staticmethod(values_of_states)


@register_strategy(
    "spo_chain",
    gives=("turn_value", "value_rollouts"),
    trains=False,
    log_probs=True,
    source="SPO, arXiv:2505.23564",
    summary="as vine, from the states before turns in which enough unlikely tokens have come together; with the method "
    "progress, alpha=0",
)
@dataclass(frozen=True)
class SpoChain(Vine):
    """Cuts an episode where the model has been unsure ``every`` times, and measures the value of the state there.

    ::

        u(t) = number of tokens in turns 0 to t whose probability was below ``below``
        measured before turn t if floor(u(t) / every) > floor(u(t-1) / every)

    From each cut K rollouts go on to their end; ``V`` and the states between are those of :class:`.vine.Vine`. The
    method ``progress`` with ``alpha=0`` gives every turn of a stretch the advantage of the stretch, and
    those before the first cut 0.

    SPO cuts a text just before every n-th unlikely token. An environment stands still between turns alone, so a cut
    inside a turn is moved to its beginning. SPO also trains the unlikely tokens alone: the loss ``segment_mask``.
    """

    every: AtLeastOne = 5
    """n: unlikely tokens from one cut to the next; 5 in the paper's first experiments, which has 2 to 100"""
    below: PositiveUnit = 0.9
    """probability below which a token is unlikely"""

    def fork(self, at: ForkPoint) -> None:
        return None

    def doubt(self, at: ForkPoint, turn: Generated) -> Fork | None:
        before = sum(self._unlikely(step.turn) for step in at.steps)
        cut = (before + self._unlikely(turn)) // self.every > before // self.every
        return Fork(self.rollouts, trained=False, turns=self.turns) if cut else None

    def _unlikely(self, turn: Generated) -> int:
        return sum(log_prob < math.log(self.below) for log_prob in turn.log_probs or [])


@register_strategy(
    "tree",
    source="the sampler is our own; TreeRL, arXiv:2506.11902, and Tree-GRPO, arXiv:2509.21240, for the credit",
    summary="forks at chosen turns into branches that are trained and fork as well; with the method tree",
)
@dataclass(frozen=True)
class Tree(Ranged):
    """Before turns ``first``, ``first + every``, ... a trajectory forks into ``branches``, up to ``depth`` forks deep.

    An episode has at most branches ** depth leaves. The method ``tree`` compares each branch with its siblings, by the
    outcomes of the leaves below it; its columns every strategy gives (``extra.parent``).

    The turns are chosen in advance, and not by entropy (TreeRL) or at random (Tree-GRPO): our own, as is the sampler.
    """

    branches: AtLeastTwo = 2
    """trajectories that continue from a fork, including the one that reached it"""
    first: Annotated[int, Range(lambda x: x >= 0, "zero or more")] = 1
    """the first turn before which a trajectory forks; before turn 0 the rollouts of a group are siblings anyway"""
    every: AtLeastOne = 2
    """turns from a fork to the next one"""
    depth: AtLeastOne = 2
    """most forks from the start to a leaf"""
    roots: Literal["shared", "own"] = "shared"
    """shared: the first turns of a group's rollouts are siblings; own: each rollout is a tree, which the method's
    rule=tree_grpo needs"""

    @property
    def clones_at_once(self) -> int:
        return self.branches**self.depth - 1

    def fork(self, at: ForkPoint) -> Fork | None:
        due = at.turn >= self.first and (at.turn - self.first) % self.every == 0
        return Fork(self.branches - 1, trained=True) if due and at.depth < self.depth else None

    columns = staticmethod(no_columns)


@register_strategy(
    "entropy_branch",
    log_probs=True,
    source="ARPO, arXiv:2507.19849",
    summary="forks where the entropy of a turn's first tokens is above that of the first turn; with the method tree, "
    "rule=arpo",
)
@dataclass(frozen=True)
class EntropyBranch(Ranged):
    """Where a turn t >= 1 begins with more entropy than turn 0, its trajectory forks in the state before it.

    ::

        dH(t) = sum over the first tokens of (H(t) - H(0)) / log(vocabulary)
        P(t) = alpha + beta dH(t)
        fork before turn t if P(t) > tau; with tau=None with probability P(t), as the released code does

    Verl's server returns the log-probability of the sampled token alone. H of a token is estimated by minus that, which
    has the entropy as its mean. Tokens that only one of the two turns has are not compared.

    The paper divides by the vocabulary; its released code, which is followed here, by the logarithm, sums the entropies
    of the ten likeliest tokens, and forks after the turn that it has measured. Where branches are missing at the end,
    paper and code fill up with fresh rollouts; here a group has fewer trajectories.
    """

    trajectories: AtLeastTwo = 16
    """M: most trajectories of a group, of which actor_rollout_ref.rollout.n are rollouts (8 in the paper)"""
    branches: AtLeastTwo = 2
    """most trajectories that continue from a fork, including the one that reached it"""
    alpha: Finite = 0.5
    """P of a turn that is as sure as the first one"""
    beta: Finite = 0.2
    """weight of the entropy in P"""
    tau: float | None = 0.5
    """fork where P is above; null: with probability P"""
    tokens: AtLeastOne = 20
    """most tokens compared at the beginning of each turn"""
    vocabulary: AtLeastTwo = 151936
    """size of the model's vocabulary, for the scale of the entropy; that of Qwen2.5"""
    roots: Literal["shared", "own"] = "shared"
    """as in tree"""
    first: ClassVar[int] = 1
    """the first turn before which a trajectory can fork"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.tau is None or math.isfinite(self.tau), "tau", "a finite number", self.tau)

    def fork(self, at: ForkPoint) -> None:
        return None

    def doubt(self, at: ForkPoint, turn: Generated) -> Fork | None:
        if not at.steps:
            return None
        now, first = ((written.log_probs or [])[: self.tokens] for written in (turn, at.steps[0].turn))
        more = math.fsum(b - a for a, b in zip(now, first, strict=False)) / math.log(self.vocabulary)
        bound = random.random() if self.tau is None else self.tau
        return Fork(self.branches - 1, trained=True) if self.alpha + self.beta * more > bound else None

    columns = staticmethod(no_columns)


@register_strategy(
    "siblings",
    gives=(SCORE,),
    source="SLATE, arXiv:2602.23440",
    summary="tries several candidates for each turn: one goes on, all are trained; with the method siblings",
)
@dataclass(frozen=True)
class Siblings(Ranged):
    """From each state k candidates for the next turn are played, and one of them goes on.

    ::

        A_j = (r_j - mean r) / (std r + 1e-6)        over the k candidates
        P(j goes on) = exp(A_j / eta) / sum over i of exp(A_i / eta)

    The score r_j is the composed reward of the turn, of an episode that is cut after it. std is the sample one.
    """

    candidates: AtLeastTwo = 5
    """k: candidates per turn; fewer if the budget allows fewer, or if some fail"""
    eta: NotNegative = 0.7
    """temperature of the choice; 0: the best one continues"""
    roots: Literal["shared", "own"] = "own"
    """own: the candidates of a rollout's first turn are compared with each other; shared: with those of its group"""
    turns: ClassVar[int] = 1

    @property
    def clones_at_once(self) -> int:
        return self.candidates - 1

    def fork(self, at: ForkPoint) -> Fork:
        return Fork(self.candidates - 1, trained=True, turns=self.turns)

    def choose(self, scores: Sequence[float]) -> int:
        best = max(scores)
        if len(scores) == 1 or self.eta == 0:
            return scores.index(best)
        mean = math.fsum(scores) / len(scores)
        std = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / (len(scores) - 1))
        # Against the best one, so that nothing overflows.
        weights = [math.exp((score - best) / (std + 1e-6) / self.eta) for score in scores]
        return random.choices(range(len(scores)), weights)[0]

    columns = staticmethod(no_columns)


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
class Probe(Ranged):
    """Before a turn the model is prompted for K answers, and their mean reward is the state's value.

    ::

        V(t) = mean over K answers of reward(answer)            extra.turn_value, before step t

    An answer is what the model writes after ``text``, with which its turn begins. The method ``progress`` with
    ``alpha=0`` gives each step the change of V, as VSRM does, and the last one the rest of the episode's return. So
    ``reward`` should match the reward at the end of an episode. States without a query move no credit, as in ``vine``.
    """

    answers: AtLeastOne = 5
    """K: answers at each state; 5 in both papers"""
    tokens: AtLeastOne = 10
    """of an answer at most; 10 in SPAE, 768 in VSRM, whose answers come with a derivation"""
    text: str = TEXT
    """beginning of each answer, in the model's own turn; trailing spaces belong to the answer"""
    temperature: Annotated[float, Range(lambda x: x >= 0, "a number >= 0")] = 0.6
    """of the answers; 0.6 in both papers"""
    stop: list[str] = field(default_factory=lambda: ["\n"])
    """what ends an answer, besides what ends a turn"""
    reward: dict[str, Any] = field(default_factory=lambda: {"name": "answer"})
    """reward of an answer: one component of turnkey.rewards, which sees it as an episode of one turn"""
    every: AtLeastOne = 1
    """query before turns 0, every, 2 every, ..."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(all(self.stop), "stop", "a list of strings that are not empty", self.stop)
        # An unknown component is an error at the start, and the parser puts its path in front.
        reward = compose_single(self.reward, "reward")
        check(reward.compares is None, "reward", "a component of one episode alone", self.reward)

    def fork(self, at: ForkPoint) -> Ask | None:
        return Ask(self.answers, self.tokens, self._value) if at.turn % self.every == 0 else None

    columns = staticmethod(values_of_states)

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
class ProbeGold(Ranged):
    """Before a turn the server scores the probability of the right answer under the model.

    ::

        p(t) = exp(mean over the tokens of the answer of log p(token | history, text))      extra.gold_probability

    ``extra.turn_value`` is the same number. The right answer is the task's: see :func:`right_answers`; of several, the
    first. A state without a score has the probability of the one before it (at the start: of the one after it), so
    it adds no gain; without any score there is no gain at all.
    """

    text: str = TEXT
    """beginning of the answer, in the model's own turn; trailing spaces belong to the answer"""
    every: AtLeastOne = 1
    """score before turns 0, every, 2 every, ..."""
    needs_answer: ClassVar[bool] = True
    """each value needs the right answer of the task"""

    def fork(self, at: ForkPoint) -> Ask | None:
        return Ask(1, 1, self._value) if at.turn % self.every == 0 else None

    def columns(self, rewards: Sequence[float], measured: Sequence[Sequence[float]]) -> Mapping[str, Sequence[float]]:
        last = next((values[0] for values in measured if values), 1.0)
        gold = [last := values[0] if values else last for values in measured]
        return {**values_of_states(rewards, measured), "gold_probability": gold}

    async def _value(self, state: QueriedState) -> float:
        right, *_ = right_answers(state.turn("", ""))
        return math.exp(await state.log_prob(self.text, right))
