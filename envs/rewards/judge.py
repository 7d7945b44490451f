"""A judge, or a process reward model, behind any OpenAI-compatible endpoint (vLLM, SGLang, a hosted model)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.rewards.components import JudgeError
from verl_turnkey.envs.rewards.endpoint import SHOWN, EndpointConfig, chat_endpoint, finite
from verl_turnkey.envs.thoughts import after_first_thoughts

Messages = Sequence[Mapping[str, Any]]


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

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            groups = re.compile(self.score_pattern).groups
        except re.error:
            groups = 0
        check(groups > 0, "score_pattern", "a regular expression with a group", self.score_pattern)
        if self.score_range is not None:
            check(self.score_range[0] != self.score_range[1], "score_range", "two different numbers", self.score_range)


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
            JudgeError: as :meth:`ask`, or the answer has no score, or one outside of ``score_range``.
        """
        return self._read(await self.ask(messages))

    async def ask(self, messages: Messages) -> str:
        """The text that the model answers, without the thoughts that it begins with.

        Raises:
            JudgeError: no usable answer after all attempts; has the URL, the status and the beginning of the answer. Or
                the answer ends before its thoughts do.
        """
        text = await self._endpoint.ask({"messages": [dict(message) for message in messages]})
        answer = after_first_thoughts(text)
        if answer is None:
            raise JudgeError(
                f"the judge at {self.config.url} gave no answer: it ends before its thoughts do; raise max_tokens in "
                f"params. Got {text[-SHOWN:]!r}"
            )
        return answer

    def _read(self, answer: str) -> float:
        if self.config.score_key is not None:
            [value] = json_numbers(answer, [self.config.score_key], self.config.url)
        else:
            found = [match[1] for match in re.finditer(self.config.score_pattern, answer)]
            value = finite(found[-1]) if found else None
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
