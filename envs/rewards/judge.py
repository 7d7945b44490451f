"""A judge, or a process reward model, behind any OpenAI-compatible endpoint (vLLM, SGLang, a hosted model)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.errors import JudgeError
from verl_turnkey.envs.http import SHOWN, Endpoint, EndpointConfig, chat_endpoint, finite
from verl_turnkey.envs.model_texts import after_first_thoughts
from verl_turnkey.envs.rewards.components import (
    Steps,
    Values,
    at_the_end,
    check_template,
    fill,
    groups,
    register_reward,
)
from verl_turnkey.envs.rewards.composition import gather
from verl_turnkey.envs.rewards.progress import differences

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
        grouped = groups(self.score_pattern) > 0
        check(grouped, "score_pattern", "a regular expression with a group", self.score_pattern)
        if self.score_range is not None:
            check(self.score_range[0] != self.score_range[1], "score_range", "two different numbers", self.score_range)
        unambiguous = not (self.binary and self.score_key)
        check(unambiguous, "score_key", "null with binary, which parses nothing", self.score_key)


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


PROMPT = """An agent was given this task:
{task}

What happened:
{transcript}

How well did the agent do, up to here? End with one line, 'Score: ' and a number from 0 (useless) to 10 (solved)."""
BINARY_PROMPT = """An agent was given this task:
{task}

What happened:
{transcript}

Will the agent solve the task? Answer 1 for yes or 0 for no."""


@register_reward("judge", hindsight=True)
@dataclass(frozen=True)
class JudgeReward(JudgeConfig):
    """The score of a model behind an OpenAI-compatible endpoint, for the episode or for each step."""

    per: Literal["episode", "step", "gain"] = "episode"
    """episode: one score, on the last step; step: every step is scored, given the episode up to and including it; gain:
    how much that score rose, from 0 before the first step"""
    prompt: str | None = None
    """the question, with the fields {task}, {transcript} and, of the last step shown, {observation} and {action}; null:
    how well the agent did, from 0 to 10, and with binary whether it will solve the task"""
    system: str | None = None
    """system message; null: none"""
    max_chars: int = 20_000
    """characters of a transcript that are shown; of longer ones beginning and end, and how much was left out"""
    score_range: tuple[float, float] | None = (0.0, 10.0)
    """the worst and the best score the model may give; they become 0 and 1. null: the score is taken as it is"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.max_chars > 0, "max_chars", "a positive integer", self.max_chars)
        check_template(self.question, "prompt")

    async def __call__(self, steps: Steps) -> Values:
        if self.per == "episode":
            return at_the_end(steps, await self._judge.score(self.messages(steps)))
        scores = await gather(self._judge.score(self.messages(steps[: t + 1])) for t in range(len(steps)))
        return differences([0.0, *scores]) if self.per == "gain" else scores

    @property
    def question(self) -> str:
        """``prompt``, or the default one."""
        return self.prompt or (BINARY_PROMPT if self.binary else PROMPT)

    def messages(self, steps: Steps) -> list[dict[str, str]]:
        """What the model is asked about ``steps``."""
        user = {"role": "user", "content": fill(self.question, steps, self.max_chars)}
        return [user] if self.system is None else [{"role": "system", "content": self.system}, user]

    @cached_property
    def _judge(self) -> Judge:
        config = JudgeConfig(**{entry.name: getattr(self, entry.name) for entry in fields(JudgeConfig)})
        return Judge(config)  # not of this object: its threads end with it


TEXT = "{task}\n\n{transcript}"


@register_reward("scorer", hindsight=True)
@dataclass(frozen=True)
class Scorer(EndpointConfig):
    """The scores of a process reward model: one request per episode, with all of its steps.

    ``api="classify"`` is that of vLLM's ``/classify``, which verl's own reward models use, too::

        {"model": ..., "input": [text of step 0, ...]}  ->  {"data": [{"index": 0, "probs": [..., score]}, ...]}

    The text of a step shows the episode up to and including it; its score is the last of ``probs``. ``api="turns"`` is
    for a server of your own::

        {"model": ..., "task": ..., "turns": [{"observation": ..., "text": ..., "action": ..., "valid": ...}, ...]}
            ->  {"scores": [score of step 0, ...]}
    """

    url: str
    """the whole address, such as http://host:8000/classify"""
    model: str | None = None
    """name of the model there; null: it is not sent"""
    api: Literal["classify", "turns"] = "classify"
    """what is sent and what comes back"""
    text: str = TEXT
    """of classify: what is shown of a step, with the fields of the judge's prompt"""
    max_chars: int = 20_000
    """of classify: characters of a transcript that are shown; of longer ones beginning and end"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self.max_chars > 0, "max_chars", "a positive integer", self.max_chars)
        check_template(self.text, "text")

    async def __call__(self, steps: Steps) -> Values:
        return await self._endpoint.ask(self.question(steps), values=len(steps))

    def question(self, steps: Steps) -> dict[str, Any]:
        """What the server is asked about an episode, besides ``model`` and ``params``."""
        if self.api == "classify":
            return {"input": [fill(self.text, steps[: t + 1], self.max_chars) for t in range(len(steps))]}
        names = ("observation", "text", "action", "valid")
        return {"task": steps[0].task, "turns": [{name: getattr(step, name) for name in names} for step in steps]}

    @cached_property
    def _endpoint(self) -> Endpoint[list[float]]:
        expected, read = {
            "classify": ("data with probs, one list of numbers per step", _classes),
            "turns": ("scores, one number per step", lambda answer: _numbers(answer["scores"])),
        }[self.api]
        return Endpoint(self, "", who="the scorer", expected=expected, read=read)


def _classes(answer: Any) -> list[float] | None:
    rows = sorted(answer["data"], key=lambda row: row["index"])
    return _numbers([row["probs"][-1] for row in rows])


def _numbers(values: list[Any]) -> list[float] | None:
    numbers = [None if isinstance(value, str) else finite(value) for value in values]
    return None if None in numbers else [number for number in numbers if number is not None]
