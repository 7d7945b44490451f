"""ArenaRL (arXiv:2601.06487 and its code): the rewards of a group are its places in a tournament.

It needs a whole group: the component of ``ranked.py`` calls it when all rollouts of a task have ended.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from statistics import fmean
from typing import Any, Generic, Literal, TypeVar

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.errors import RewardError
from verl_turnkey.envs.http import EndpointConfig
from verl_turnkey.envs.rewards.components import Ranking, Steps, Values, call_own, check_template, fill, register_reward
from verl_turnkey.envs.rewards.composition import gather
from verl_turnkey.envs.rewards.judge import Judge, JudgeConfig, json_numbers
from verl_turnkey.envs.user_modules import load_function

T = TypeVar("T")
PairJudge = Callable[[T, T], Awaitable[tuple[float, float]]]

RUBRIC = "Which of the two solved the task better? Be strict about facts, completeness and needless steps."
PAIR_PROMPT = """{rubric}

<first>
{first}
</first>

<second>
{second}
</second>

Judge them independently of the order. End with a JSON object with two scores from 0 to 10:
{{"first": 0, "second": 0}}"""


@dataclass(frozen=True)
class Standing:
    """The result of a tournament."""

    order: tuple[str, ...]
    """keys of the members, the champion first"""
    games: int
    """pairs that were judged, each in both orders"""

    @property
    def rewards(self) -> dict[str, float]:
        """1 - place / (members - 1), places from 0; a lone member gets 0."""
        last = len(self.order) - 1
        return {key: 1.0 - place / last if last else 0.0 for place, key in enumerate(self.order)}


async def tournament(
    members: Mapping[str, T], judge: PairJudge[T], *, seed: int = 0, pivot_games: Literal["mean", "all"] = "mean"
) -> Standing:
    """Seeded single elimination over a group; about two games per member.

    1. Everybody plays one of the members, the pivot. These scores (for the pivot, the mean of its own) make the seeding
       list.
    2. In the bracket the best seeds are placed as far apart as can be. The higher score goes on; a tie goes to the one
       that stands first in the bracket. Free places, when the number of members is not a power of two, go to the best
       seeds, who then skip the first round. (The released code closes the gaps instead, so that the last one in the
       bracket gets a free round; at its group size, 16, there are none.)
    3. The champion is followed by the losers of the last round, of the one before, and so on; inside a round by their
       mean score in all their games, for which the pivot's seeding games are one, or with ``pivot_games="all"`` as many
       as they were.

    The order of the members does not matter. A hash of ``seed`` and the member's key decides who is the pivot, and
    breaks ties (the released code: the order of the group).

    Args:
        members: what is to be judged, by a key that is unique in the group, such as the name of the rollout.
        judge: scores for two members in the order they are shown; it is asked in both orders, and the scores are added.
        seed: another one draws another seeding.
        pivot_games: ``"mean"``, as in the released code, gives the pivot one score for its seeding games, as every
            other member has one; ``"all"`` keeps each, so that its bracket games hardly move its mean in a large group.

    Raises:
        ValueError: no members, or another ``pivot_games``.
        RewardError: the judge gives a score that is not finite, or fails.
    """
    if not members:
        raise ValueError("a tournament needs at least one member")
    if pivot_games not in ("mean", "all"):
        raise ValueError(f"pivot_games: expected 'mean' or 'all', got {pivot_games!r}")
    by_lot = sorted(members, key=lambda key: hashlib.sha256(f"{seed}:{key}".encode()).digest())
    table = _Table(members, judge)
    pivot, *others = by_lot
    await table.play([(key, pivot) for key in others])
    if pivot_games == "mean":
        table.average(pivot)
    seeds = sorted(by_lot, key=table.mean, reverse=True)
    bracket = [seeds[i] if i < len(seeds) else None for i in _places(len(seeds))]
    rounds: list[list[str]] = []
    while len(bracket) > 1:
        pairs = list(zip(bracket[::2], bracket[1::2], strict=True))
        results = iter(await table.play([(a, b) for a, b in pairs if a is not None and b is not None]))
        bracket, losers = [], []
        for a, b in pairs:
            if a is None or b is None:
                bracket.append(a if b is None else b)
                continue
            score_a, score_b = next(results)
            bracket.append(a if score_a >= score_b else b)
            losers.append(b if score_a >= score_b else a)
        rounds.append(losers)
    order = [key for key in bracket if key is not None]
    for losers in reversed(rounds):
        order += sorted(losers, key=lambda key: (-table.mean(key), seeds.index(key)))
    return Standing(tuple(order), table.games)


def _places(members: int) -> list[int]:
    """Seed numbers from top to bottom of a full bracket: 0 meets 1 in the last round only."""
    places = [0]
    while len(places) < members:
        places = [place for seed in places for place in (seed, 2 * len(places) - 1 - seed)]
    return places


class _Table(Generic[T]):
    """Plays games and keeps everybody's scores."""

    def __init__(self, members: Mapping[str, T], judge: PairJudge[T]) -> None:
        self.games = 0
        self._members, self._judge = members, judge
        self._scores: dict[str, list[float]] = {key: [] for key in members}

    def mean(self, key: str) -> float:
        return fmean(self._scores[key]) if self._scores[key] else 0.0

    def average(self, key: str) -> None:
        """Let the games so far count as one."""
        self._scores[key] = [self.mean(key)] if self._scores[key] else []

    async def play(self, pairs: list[tuple[str, str]]) -> list[tuple[float, float]]:
        results = await gather(self._game(self._members[a], self._members[b]) for a, b in pairs)
        for (a, b), (score_a, score_b) in zip(pairs, results, strict=True):
            self._scores[a].append(score_a)
            self._scores[b].append(score_b)
        self.games += len(pairs)
        return results

    async def _game(self, a: T, b: T) -> tuple[float, float]:
        (there_a, there_b), (back_b, back_a) = await gather([self._judge(a, b), self._judge(b, a)])
        score_a, score_b = there_a + back_a, there_b + back_b
        if not (math.isfinite(score_a) and math.isfinite(score_b)):
            raise RewardError(f"expected finite scores from the judge of pairs, got {score_a} and {score_b}")
        return score_a, score_b


def pairwise(judge: Judge, rubric: str = RUBRIC) -> PairJudge[str]:
    """A judge of texts for :func:`tournament`: a model compares two by ``rubric`` and scores both from 0 to 10."""

    async def compare(first: str, second: str) -> tuple[float, float]:
        prompt = PAIR_PROMPT.format(rubric=rubric, first=first, second=second)
        answer = await judge.ask([{"role": "user", "content": prompt}])
        first_score, second_score = json_numbers(answer, ("first", "second"), judge.config.url)
        return first_score, second_score

    return compare


@register_reward("arena", hindsight=True, group=True)
@dataclass(frozen=True)
class Arena(EndpointConfig):
    """The place of the episode in a tournament of its group, from 1 (the champion) to 0, on the last step.

    Episodes are compared in pairs, by a model behind an OpenAI-compatible endpoint or by a function of yours. Those
    that failed take no part; an episode without others gets 0.
    """

    url: str | None = None
    """base URL of the judge's API, such as http://host:8000/v1"""
    model: str | None = None
    """name of the judge there"""
    params: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})
    """further fields of the request, such as temperature, max_tokens or seed"""
    compare: str | None = None
    """instead of url: module:function of yours from the steps of two episodes to two scores, may be async"""
    rubric: str = RUBRIC
    """by what the judge compares"""
    text: str = "{task}\n\n{transcript}"
    """what the judge is shown of an episode, with the fields of the judge's prompt"""
    max_chars: int = 20_000
    """characters of a transcript that are shown; of longer ones beginning and end"""
    seed: int = 0
    """another seed draws another seeding"""
    pivot_games: Literal["mean", "all"] = "mean"
    """the first games of the one that seeds the others count as one game, as in the released code, or as many"""

    def __post_init__(self) -> None:
        check((self.url is None) != (self.compare is None), "url", "either url and model, or compare", self.url)
        check(self.max_chars > 0, "max_chars", "a positive integer", self.max_chars)
        check_template(self.text, "text")
        if self.url is not None:
            super().__post_init__()
            check(bool(self.model), "model", "the name of the judge", self.model)
        elif self.compare is not None:
            load_function(self.compare, "compare")  # a missing function is an error at the start

    def __call__(self, steps: Steps) -> Values:
        return [0.0] * len(steps)  # nobody to compare it with

    async def of_group(self, members: Mapping[str, Steps]) -> Ranking:
        """The reward of each member, and the number of comparisons."""
        judge = self._by_rule if self._judge is None else self._by_model
        standing = await tournament(members, judge, seed=self.seed, pivot_games=self.pivot_games)
        return standing.rewards, 2 * standing.games

    async def _by_model(self, first: Steps, second: Steps) -> tuple[float, float]:
        assert self._judge is not None
        first_text, second_text = (fill(self.text, steps, self.max_chars) for steps in (first, second))
        return await pairwise(self._judge, self.rubric)(first_text, second_text)

    async def _by_rule(self, first: Steps, second: Steps) -> tuple[float, float]:
        scores = await call_own(load_function(str(self.compare), "compare"), first, second)
        try:
            first_score, second_score = map(float, scores)
        except (TypeError, ValueError):
            raise RewardError(f"expected two scores from {self.compare}, got {scores!r}") from None
        return first_score, second_score

    @cached_property
    def _judge(self) -> Judge | None:
        if self.url is None:
            return None
        return Judge(JudgeConfig(**{entry.name: getattr(self, entry.name) for entry in fields(EndpointConfig)}))
