"""A judge, or a process reward model, behind any OpenAI-compatible endpoint (vLLM, SGLang, a hosted model).

Only the standard library: ``POST <url>/chat/completions`` from a pool of threads, so that the event loop never waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import random
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from verl_turnkey.advantage.params import check
from verl_turnkey.envs.rewards.components import JudgeError

Messages = Sequence[Mapping[str, Any]]
SHOWN = 200  # characters of an answer that an error quotes
LONGEST_WAIT = 60.0  # seconds between two attempts, whatever a server asks for


@dataclass(frozen=True)
class JudgeConfig:
    """Address of a judge, timeouts and retries, and how its score is parsed."""

    url: str
    """base URL of the API, such as http://host:8000/v1"""
    model: str
    """name of the model there"""
    api_key_env: str | None = None
    """environment variable that holds the API key, on every node; null: no key is sent"""
    params: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})
    """further fields of the request, such as temperature, max_tokens or seed"""
    timeout: float = 60.0
    """seconds that one attempt may take"""
    retries: int = 4
    """further attempts after an answer 408, 429 or 5xx, a timeout or a broken connection"""
    backoff: float = 1.0
    """seconds before the second attempt, doubled for each further one; Retry-After of the server counts if longer"""
    concurrency: int = 16
    """requests under way at once, per agent-loop worker"""
    cache: str | None = None
    """folder in which answers are kept and shared between processes and runs; null: in memory only"""
    cache_size: int = 100_000
    """answers kept in memory; the oldest go first"""
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
        parts = urlsplit(self.url)
        plain = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
        check(bool(plain), "url", "http(s)://host:port/v1 without a password in it", self.url)
        check(self.timeout > 0, "timeout", "positive seconds", self.timeout)
        check(self.retries >= 0, "retries", "zero or more", self.retries)
        check(self.backoff >= 0, "backoff", "zero or more seconds", self.backoff)
        check(self.concurrency > 0, "concurrency", "a positive integer", self.concurrency)
        check(self.cache_size >= 0, "cache_size", "zero or more", self.cache_size)
        try:
            groups = re.compile(self.score_pattern).groups
        except re.error:
            groups = 0
        check(groups > 0, "score_pattern", "a regular expression with a group", self.score_pattern)
        if self.score_range is not None:
            check(self.score_range[0] != self.score_range[1], "score_range", "two different numbers", self.score_range)


class Judge:
    """Asks a model and parses scores from its answers; to be used from one event loop at a time.

    Equal questions are asked once: an answer is kept by URL, model, messages and params, and a question that is under
    way already is waited for. Redirects are not followed, since the API key would go with them.
    """

    def __init__(self, config: JudgeConfig) -> None:
        self.config = config
        self._endpoint = config.url.rstrip("/") + "/chat/completions"
        self._threads = ThreadPoolExecutor(config.concurrency, thread_name_prefix="judge")
        self._open = urllib.request.build_opener(_NoRedirects).open
        self._answers: dict[str, str] = {}
        self._asked: dict[str, asyncio.Task[str]] = {}
        self._jitter = random.Random()  # its own: the global generator is not advanced

    async def score(self, messages: Messages) -> float:
        """The score that the model gives.

        Raises:
            JudgeError: as :meth:`ask`, or the answer has no score, or one outside of ``score_range``.
        """
        return self._read(await self.ask(messages))

    async def ask(self, messages: Messages) -> str:
        """The text that the model answers.

        Raises:
            JudgeError: no usable answer after all attempts; has the URL, the status and the beginning of the answer.
        """
        question = {
            **self.config.params,
            "model": self.config.model,
            "messages": [dict(message) for message in messages],
        }
        body = json.dumps(question, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")
        key = hashlib.sha256(self._endpoint.encode() + b"\n" + body).hexdigest()
        if key in self._answers:
            return self._answers[key]
        if key not in self._asked:
            self._asked[key] = asyncio.ensure_future(self._fetch(key, body))
            self._asked[key].add_done_callback(lambda _: self._asked.pop(key, None))
        # Shielded: a caller that is cancelled does not cancel the request for the others.
        return await asyncio.shield(self._asked[key])

    async def _fetch(self, key: str, body: bytes) -> str:
        loop, stored = asyncio.get_running_loop(), self.config.cache is not None
        answer = await loop.run_in_executor(None, self._load, key) if stored else None
        if answer is None:
            answer = await self._attempts(body)
            if stored:
                await loop.run_in_executor(None, self._save, key, answer)
        self._answers[key] = answer
        if len(self._answers) > self.config.cache_size:
            del self._answers[next(iter(self._answers))]
        return answer

    async def _attempts(self, body: bytes) -> str:
        loop = asyncio.get_running_loop()
        tried, wait = 0, self.config.backoff
        while True:
            reply = await loop.run_in_executor(self._threads, self._post, body)
            tried += 1
            if reply.status == 200:
                return self._content(reply)
            if not reply.again or tried > self.config.retries:
                raise self._error(reply, f"gave no answer in {tried} attempt{'s' if tried > 1 else ''}")
            # Wait here and not in the thread, which others may use meanwhile.
            await asyncio.sleep(min(LONGEST_WAIT, max(wait * self._jitter.uniform(0.75, 1.25), reply.wait)))
            wait *= 2

    def _post(self, body: bytes) -> _Reply:
        """One attempt, in a thread."""
        request = urllib.request.Request(self._endpoint, body, {"Content-Type": "application/json", **self._login()})
        end = time.monotonic() + self.config.timeout
        try:
            try:
                response: Any = self._open(request, timeout=self.config.timeout)
            except urllib.error.HTTPError as error:
                response = error  # an answer all the same
            with response:
                return _Reply(response.getcode(), _read(response, end), _seconds(response.headers))
        except (OSError, HTTPException) as error:  # timeouts and broken connections; URLError is an OSError
            reason = getattr(error, "reason", error)
            return _Reply(None, f"{type(reason).__name__}: {reason}")

    def _login(self) -> dict[str, str]:
        name = self.config.api_key_env
        if name is None:
            return {}
        key = os.environ.get(name, "").strip()
        if not key or not (key.isascii() and key.isprintable()):
            raise JudgeError(
                f"the judge at {self._endpoint} needs an API key: set the environment variable {name} on every node"
            )
        return {"Authorization": f"Bearer {key}"}

    def _content(self, reply: _Reply) -> str:
        try:
            content = json.loads(reply.body)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError, RecursionError):
            content = None
        if not isinstance(content, str):
            raise self._error(reply, "answered with something else than a chat completion")
        return content

    def _error(self, reply: _Reply, what: str) -> JudgeError:
        shown = reply.body
        if self.config.api_key_env and (secret := os.environ.get(self.config.api_key_env, "").strip()):
            shown = shown.replace(secret, "***")  # some servers quote a refused key
        status = f"status {reply.status}" if reply.status else "no status"
        return JudgeError(f"the judge at {self._endpoint} {what} ({status}): {shown[:SHOWN]!r}")

    # --- the cache ---------------------------------------------------------------------------------------------------

    def _file(self, key: str) -> Path:
        return Path(self.config.cache or "").expanduser() / key[:2] / f"{key}.json"

    def _load(self, key: str) -> str | None:
        try:
            return str(json.loads(self._file(key).read_text(encoding="utf-8"))["answer"])
        except (OSError, ValueError, LookupError, TypeError):  # missing or incomplete: ask again
            return None

    def _save(self, key: str, answer: str) -> None:
        file = self._file(key)
        part = file.with_suffix(f".{uuid4().hex}")
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"model": self.config.model, "answer": answer}), encoding="utf-8")
        part.replace(file)  # atomic, for processes that read meanwhile

    # --- scores ------------------------------------------------------------------------------------------------------

    def _read(self, answer: str) -> float:
        if self.config.score_key is not None:
            [value] = json_numbers(answer, [self.config.score_key], self.config.url)
        else:
            found = [match[1] for match in re.finditer(self.config.score_pattern, answer)]
            value = _number(found[-1]) if found else None
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
        numbers = [_number(value.get(key)) for key in keys]
        if None not in numbers:
            return [number for number in numbers if number is not None]
    raise JudgeError(
        f"the judge at {url} gave no score: expected a JSON object with numbers under {', '.join(keys)}, "
        f"got {answer[-SHOWN:]!r}"
    )


@dataclass(frozen=True)
class _Reply:
    status: int | None
    """None: there was no answer, and ``body`` says why"""
    body: str
    wait: float = 0.0
    """seconds that the server asks to wait"""

    @property
    def again(self) -> bool:
        return self.status is None or self.status in (408, 429) or self.status >= 500


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _read(response: Any, end: float) -> str:
    """The body, by the time ``end``; the socket's own timeout restarts with every byte."""
    pieces = []
    while piece := response.read1(65536):
        pieces.append(piece)
        if time.monotonic() > end:
            raise TimeoutError("the answer took too long")
    if response.length:  # read1 does not complain
        raise ConnectionError("the answer broke off")
    return b"".join(pieces).decode("utf-8", "replace")


def _seconds(headers: Any) -> float:
    value = _number(headers.get("Retry-After"))
    return max(0.0, value) if value is not None else 0.0


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):  # OverflowError: a JSON integer may be larger than any float
        return None
    return number if math.isfinite(number) else None
