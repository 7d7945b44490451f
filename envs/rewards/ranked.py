"""The component ``arena``: the place of an episode in a tournament of its group (ArenaRL)."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.rewards.arena import RUBRIC, pairwise, tournament
from verl_turnkey.envs.rewards.components import RewardError, Steps, Values, register_reward
from verl_turnkey.envs.rewards.endpoint import EndpointConfig
from verl_turnkey.envs.rewards.group import Ranking
from verl_turnkey.envs.rewards.judge import Judge, JudgeConfig
from verl_turnkey.envs.rewards.transcript import check_template, fill
from verl_turnkey.envs.user_modules import load_function


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
        rule: Callable[[Steps, Steps], Any] = load_function(str(self.compare), "compare")
        wait = inspect.iscoroutinefunction(rule)
        scores = await rule(first, second) if wait else await asyncio.to_thread(rule, first, second)
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
