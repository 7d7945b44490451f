"""A judge, or a process reward model, behind any OpenAI-compatible endpoint (vLLM, SGLang, a hosted model)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.rewards.components import JudgeError
from verl_turnkey.envs.rewards.endpoint import SHOWN, Endpoint, EndpointConfig, chat_endpoint, finite
from verl_turnkey.envs.thoughts import after_first_thoughts

Messages = Sequence[Mapping[str, Any]]
ONE_TOKEN = {"max_tokens": 1, "logprobs": True, "top_logprobs": 20}
"""of a binary question: the likeliest first tokens of the answer, as many as vLLM and OpenAI give"""


@dataclass(frozen=True)
class JudgeConfig(EndpointConfig):
    """Address of a judge, timeouts and retries, and how its score is parsed."""

    params: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})
    """further fields of the request, such as temperature, max_tokens or seed"""
    score_pattern: str = (
        r"(?im)^[^\w\n]*(?:(?:final|overall) )?score[^\w\n]*[:=][^\w\n.+-]*"
        r"([+-]?(?:\d+(?:\.\d+)?|\.\d+))(?![\d.]* *[-–] *\d)"  # no range, as in "Score: (0-10) 7"
    )
    """regular expression whose first group is the score; the last match in the answer counts"""
    score_key: str | None = None
    """read the score from this key of the last JSON object in the answer that has it, instead of by pattern"""
    score_range: tuple[float, float] | None = None
    """the worst and the best score the model may give; they become 0 and 1. null: the score is taken as it is"""
    binary: bool = False
    """the model answers 1 or 0, and the score is the probability of 1 among the two, from the log-probabilities of the
    first token; nothing is parsed, and score_range is for other answers"""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            groups = re.compile(self.score_pattern).groups
        except re.error:
            groups = 0
        check(groups > 0, "score_pattern", "a regular expression with a group", self.score_pattern)
        if self.score_range is not None:
            check(self.score_range[0] != self.score_range[1], "score_range", "two different numbers", self.score_range)
        check(
            not (self.binary and self.score_key), "score_key", "null with binary, which parses nothing", self.score_key
        )


class Judge:
    """Asks a model, by ``POST <url>/chat/completions``, and parses scores from its answers.

    To be used from one event loop at a time. Equal questions are asked once: see :class:`Endpoint`.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        self._endpoint = chat_endpoint(config, "the judge")

    async def score(self, messages: Messages) -> float:
        """The score that the model gives.

        Raises:
            JudgeError: as :meth:`ask`, or the answer has no score, or one outside of ``score_range``. ``binary``: there
                are no log-probabilities, or neither 1 nor 0 is among the likely tokens.
        """
        if self.config.binary:
            return self._share(await self._first_token.ask({**_question(messages), **ONE_TOKEN}))
        return self._read(await self.ask(messages))

    async def ask(self, messages: Messages) -> str:
        """The text that the model answers, without the thoughts that it begins with.

        Raises:
            JudgeError: no usable answer after all attempts; has the URL, the status and the beginning of the answer. Or
                the answer ends before its thoughts do.
        """
        text = await self._endpoint.ask(_question(messages))
        answer = after_first_thoughts(text)
        if answer is None:
            raise JudgeError(
                f"the judge at {self.config.url} gave no answer: it ends before its thoughts do; raise max_tokens in "
                f"params. Got {text[-SHOWN:]!r}"
            )
        return answer

    @cached_property
    def _first_token(self) -> Endpoint[list[list[Any]]]:
        expected = "a chat completion with logprobs, which binary needs"
        return Endpoint(self.config, "/chat/completions", who="the judge", expected=expected, read=_first_token)

    def _share(self, tokens: list[list[Any]]) -> float:
        """The probability of 1 among 1 and 0; ``tokens``: text and log-probability of each."""
        yes, no = (sum(math.exp(number) for text, number in tokens if text.strip() == word) for word in "10")
        if not yes + no:
            raise JudgeError(
                f"the judge at {self.config.url} answers neither 1 nor 0: its likeliest tokens are "
                f"{', '.join(repr(text) for text, _ in tokens[:5])}"
            )
        return yes / (yes + no)

    def _read(self, answer: str) -> float:
        if self.config.score_key is not None:
            [value] = json_numbers(answer, [self.config.score_key], self.config.url)
        else:
            matches = [match[1] for match in re.finditer(self.config.score_pattern, answer)]
            value = finite(matches[-1]) if matches else None
            if value is None:
                raise JudgeError(
                    f"the judge at {self.config.url} gave no score: expected a match of score_pattern "
                    f"{self.config.score_pattern!r}, got {answer[-SHOWN:]!r}"
                )
        if self.config.score_range is None:
            return value
        worst, best = self.config.score_range
        if not min(worst, best) <= value <= max(worst, best):
            raise JudgeError(f"the judge at {self.config.url} gave the score {value}, outside of {worst} to {best}")
        return (value - worst) / (best - worst)


def _question(messages: Messages) -> dict[str, Any]:
    return {"messages": [dict(message) for message in messages]}


def _first_token(answer: Any) -> list[list[Any]] | None:
    """Text and log-probability of the likeliest first tokens, the likeliest first."""
    tokens = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    pairs = [[str(token["token"]), float(token["logprob"])] for token in tokens]
    return sorted(pairs, key=lambda pair: -pair[1]) or None


def json_numbers(answer: str, keys: Sequence[str], url: str) -> list[float]:
    """The numbers under ``keys`` of the last JSON object in ``answer`` that has them all; ``url`` is for the error.

    Raises:
        JudgeError: there is no such object.
    """
    decoder = json.JSONDecoder()
    for start in sorted((match.start() for match in re.finditer(r"\{", answer)), reverse=True):
        try:
            value, _ = decoder.raw_decode(answer, start)
        except (ValueError, RecursionError):
            continue
        numbers = [finite(value.get(key)) for key in keys]
        if None not in numbers:
            return [number for number in numbers if number is not None]
    raise JudgeError(
        f"the judge at {url} gave no score: expected a JSON object with numbers under {', '.join(keys)}, "
        f"got {answer[-SHOWN:]!r}"
    )
