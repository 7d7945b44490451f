"""JSON over HTTP with the standard library: calls of servers that hold environments, and questions to models.

:func:`post_json` is for environments and retrievers. It ignores proxies of environment variables: these servers run in
the same cluster, where a proxy that swallows calls to 127.0.0.1 is the more common accident. A call may change an
environment: it is sent again only when it certainly did not arrive, which http.client can tell and urllib cannot.

:class:`Endpoint` is for judges and other models, whose needs are the opposite: proxies on the way to hosted models,
questions that may be asked twice, waits (``Retry-After``) that hold no thread, deadlines, a bound on requests at once
and a cache. It posts from a pool of threads, so that the event loop never waits.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import logging
import math
import os
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from verl_turnkey.advantage.params import check
from verl_turnkey.advantage.text_files import write_text
from verl_turnkey.envs.daemon_threads import DaemonThreads
from verl_turnkey.envs.errors import EnvironmentKwargsError, JudgeError

_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
_BUSY = (502, 503, 504)  # a proxy or a server that asks the client to retry later


def on_this_machine(url: str) -> bool:
    """Whether a server is reached by this machine's own name or loopback address, as by no proxy."""
    host = urlsplit(url).hostname or ""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


class ServerError(RuntimeError):
    """A server cannot be reached, refused a call, or answered in an unexpected form."""


def check_url(url: Any, key: str) -> str:
    """``url`` without a slash at its end. ``key`` is the argument that the error names."""
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        good = parts.scheme in _CONNECTIONS and bool(parts.hostname) and parts.port != 0
        good = good and "@" not in parts.netloc  # a login would not be sent, and errors would show it
    except ValueError:  # half an IPv6 address, or a port that is not a number
        good = False
    if not good:
        raise EnvironmentKwargsError(f"{key} must be a URL like http://127.0.0.1:8000, without a login, not {url!r}")
    return url.rstrip("/")


def post_json(url: str, payload: Any, *, timeout: float, key: str, attempts: int = 3, repeatable: bool = False) -> Any:
    """Send ``payload`` and return the answer, both JSON.

    Args:
        timeout: seconds to wait for the connection, and for each piece of the answer.
        key: the configuration key that holds the address, for the errors.
        attempts: how often to try, with growing pauses (0.2 s, 0.4 s, ...).
        repeatable: whether asking twice does no harm. A call that is not repeatable is tried again only when it
            certainly did not arrive.

    Raises:
        ServerError: after the last attempt.
    """
    # Servers do not expect half a surrogate pair, which a decoder can leave in a text.
    body = json.dumps(payload, ensure_ascii=False).encode("utf-8", "replace")
    reason = ""
    for attempt in range(attempts):
        if attempt:
            time.sleep(0.1 * 2**attempt)
        try:
            return _post(url, body, timeout)
        except _NotSentError as error:
            reason = f"cannot be reached ({error}): is it running? Its address is set in {key}"
        except _RefusedError as error:
            reason = f"answered {error}"
            if not (repeatable and error.status in _BUSY):
                break
        except (OSError, http.client.HTTPException) as error:
            reason = f"did not answer within {timeout:g} s or broke off ({type(error).__name__}: {error})"
            if not repeatable:
                break
    raise ServerError(f"the server at {url} {reason}")


class _NotSentError(Exception):
    """No connection: the call did not arrive."""


class _RefusedError(Exception):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status}: {text[:1000]}")
        self.status = status


def _post(url: str, body: bytes, timeout: float) -> Any:
    parts = urlsplit(url)
    connection = _CONNECTIONS[parts.scheme](parts.hostname or "", parts.port, timeout=timeout)
    try:
        try:
            connection.connect()
        except OSError as error:
            raise _NotSentError(error) from None
        # http.client sets TCP_NODELAY, so that its two sends (header, body) do not wait for an acknowledgement.
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, body, {"Content-Type": "application/json", "Connection": "close"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise _RefusedError(answer.status, text.decode("utf-8", "replace"))
    try:
        return json.loads(text)
    except ValueError:
        raise _RefusedError(answer.status, f"no JSON, but {text[:200]!r}") from None


SHOWN = 200  # characters of an answer that an error quotes
LONGEST_WAIT = 60.0  # seconds between two attempts, whatever a server asks for

logger = logging.getLogger(__name__)
T = TypeVar("T", bound=Sized)


@dataclass(frozen=True)
class EndpointConfig:
    """Address of a model, timeouts and retries."""

    url: str
    """base URL of the API, such as http://host:8000/v1"""
    model: str
    """name of the model there"""
    api_key_env: str | None = None
    """environment variable that holds the API key, on every node; null: no key is sent"""
    params: dict[str, Any] = field(default_factory=dict)
    """further fields of the request"""
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

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        plain = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
        check(bool(plain), "url", "http(s)://host:port/v1 without a password in it", self.url)
        check(self.timeout > 0, "timeout", "positive seconds", self.timeout)
        check(self.retries >= 0, "retries", "zero or more", self.retries)
        check(self.backoff >= 0, "backoff", "zero or more seconds", self.backoff)
        check(self.concurrency > 0, "concurrency", "a positive integer", self.concurrency)
        check(self.cache_size >= 0, "cache_size", "zero or more", self.cache_size)


def chat_endpoint(config: EndpointConfig, who: str) -> Endpoint[str]:
    """The endpoint whose answers are the texts of chat completions; ``who``: what errors call it."""
    return Endpoint(config, "/chat/completions", who=who, expected="a chat completion", read=_content)


def _content(answer: Any) -> str | None:
    content = answer["choices"][0]["message"]["content"]
    return content if isinstance(content, str) else None


class Endpoint(Generic[T]):
    """Posts questions and reads the answers; to be used from one event loop at a time.

    Equal questions are asked once: an answer is kept by URL, model and the rest of the question, and a question that is
    under way already is waited for. Redirects are not followed, since the API key would go with them.

    Args:
        config: where and how.
        path: what follows ``config.url``, such as ``/chat/completions``.
        who: what errors call it, such as "the judge".
        expected: what an answer is, for the error about another one.
        read: turns the JSON of an answer into a JSON value; returns None or raises where the answer is unexpected.
        key: the API key itself, for a server that this process has started; ``config.api_key_env`` is not read then.
    """

    def __init__(
        self,
        config: EndpointConfig,
        path: str,
        *,
        who: str,
        expected: str,
        read: Callable[[Any], T | None],
        key: str | None = None,
    ) -> None:
        self.config = config
        self.address = config.url.rstrip("/") + path
        self._who, self._expected, self._read, self._key = who, expected, read, key
        self._threads = DaemonThreads(config.concurrency, "endpoint")
        self._open = opener(config.url).open
        self._answers: dict[str, T] = {}
        self._pending: dict[str, asyncio.Task[T]] = {}
        self._unsaved = False
        self._jitter = random.Random()  # its own: the global generator is not advanced

    async def ask(self, question: Mapping[str, Any], values: int | None = None) -> T:
        """The answer to ``question``, to which ``params`` and ``model`` are added.

        ``values``: the length that a list as answer must have; a list of another length is an error and is not cached.

        Raises:
            JudgeError: no usable answer after all attempts; has the URL, the status and the beginning of the answer.
        """
        whole = {**self.config.params, **({"model": self.config.model} if self.config.model else {}), **question}
        body = json.dumps(whole, sort_keys=True, ensure_ascii=False).encode("utf-8", "replace")
        key = hashlib.sha256(self.address.encode() + b"\n" + body).hexdigest()
        if key in self._answers:
            return self._answers[key]
        if key not in self._pending:
            self._pending[key] = asyncio.ensure_future(self._fetch(key, body, values))
            self._pending[key].add_done_callback(lambda _: self._pending.pop(key, None))
        # Shielded: a caller that is cancelled does not cancel the request for the others.
        return await asyncio.shield(self._pending[key])

    async def look_up(self, path: str) -> Any:
        """The JSON at ``config.url`` and ``path``, asked for once; None: there is no such answer."""
        request = urllib.request.Request(self.config.url.rstrip("/") + path, headers=self._login())
        reply = await asyncio.get_running_loop().run_in_executor(self._threads, self._send, request)
        with suppress(ValueError, RecursionError):
            return json.loads(reply.body) if reply.status == 200 else None

    async def _fetch(self, key: str, body: bytes, values: int | None) -> T:
        loop, stored = asyncio.get_running_loop(), self.config.cache is not None
        answer = await loop.run_in_executor(None, self._load, key, values) if stored else None
        if answer is None:
            answer = await self._attempts(body, values)
            if stored:
                await loop.run_in_executor(None, self._save, key, answer)
        self._answers[key] = answer
        if len(self._answers) > self.config.cache_size:
            del self._answers[next(iter(self._answers))]
        return answer

    async def _attempts(self, body: bytes, values: int | None) -> T:
        loop = asyncio.get_running_loop()
        tried, wait = 0, self.config.backoff
        while True:
            reply, content = await loop.run_in_executor(self._threads, self._attempt, body, values)
            tried += 1
            if content is not None:
                return content
            if not reply.again or tried > self.config.retries:
                raise self._error(reply, f"gave no answer in {tried} attempt{'s' if tried > 1 else ''}")
            # Wait here and not in the thread, which others may use meanwhile.
            await asyncio.sleep(min(LONGEST_WAIT, max(wait * self._jitter.uniform(0.75, 1.25), reply.wait)))
            wait *= 2

    def _attempt(self, body: bytes, values: int | None) -> tuple[_Reply, T | None]:
        """One attempt, in a thread, where long answers are read as well."""
        headers = {"Content-Type": "application/json", **self._login()}
        reply = self._send(urllib.request.Request(self.address, body, headers))
        return reply, self._content(reply, values) if reply.status == 200 else None

    def _send(self, request: urllib.request.Request) -> _Reply:
        end = time.monotonic() + self.config.timeout
        try:
            try:
                response: Any = self._open(request, timeout=self.config.timeout)
            except urllib.error.HTTPError as error:
                response = error  # an answer all the same
            with response:
                wait = max(0.0, finite(response.headers.get("Retry-After")) or 0.0)
                return _Reply(response.getcode(), _body(response, end), wait)
        except (OSError, HTTPException) as error:  # timeouts and broken connections; URLError is an OSError
            reason = getattr(error, "reason", error)
            return _Reply(None, f"{type(reason).__name__}: {reason}")

    def _login(self) -> dict[str, str]:
        name, key = self.config.api_key_env, self._secret()
        if name is None and not key:
            return {}
        if not key or not (key.isascii() and key.isprintable()):
            raise JudgeError(
                f"{self._who} at {self.address} needs an API key: set the environment variable {name} on every node"
            )
        return {"Authorization": f"Bearer {key}"}

    def _secret(self) -> str:
        return self._key or os.environ.get(self.config.api_key_env or "", "").strip()

    def _content(self, reply: _Reply, values: int | None) -> T:
        try:
            content = self._read(json.loads(reply.body))
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            content = None
        if content is None:
            raise self._error(reply, f"answered with something else than {self._expected}")
        if not _fits(content, values):
            raise self._error(reply, f"gave {len(content)} values instead of {values}")
        return content

    def _error(self, reply: _Reply, what: str) -> JudgeError:
        body = reply.body
        if secret := self._secret():
            body = body.replace(secret, "***")  # some servers quote a refused key
        status = f"status {reply.status}" if reply.status else "no status"
        return JudgeError(f"{self._who} at {self.address} {what} ({status}): {body[:SHOWN]!r}")

    def _file(self, key: str) -> Path:
        return Path(self.config.cache or "").expanduser() / key[:2] / f"{key}.json"

    def _load(self, key: str, values: int | None) -> T | None:
        try:
            answer = json.loads(self._file(key).read_text(encoding="utf-8"))["answer"]
            return answer if _fits(answer, values) else None
        except (OSError, ValueError, LookupError, TypeError):  # missing or incomplete: ask again
            return None

    def _save(self, key: str, answer: T) -> None:
        try:
            write_text(self._file(key), json.dumps({"model": self.config.model, "answer": answer}))
        except OSError as error:  # a full disk: the answer itself is good
            if not self._unsaved:
                self._unsaved = True
                logger.warning("cache: answers of %s are not kept in %s: %s", self._who, self.config.cache, error)


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


def opener(url: str) -> urllib.request.OpenerDirector:
    """Follows no redirects, and asks a server on this machine itself: a proxy of ``http_proxy`` cannot reach it."""
    direct = [urllib.request.ProxyHandler({})] if on_this_machine(url) else []
    return urllib.request.build_opener(_NoRedirects, *direct)


def _body(response: Any, end: float) -> str:
    """The body, by the time ``end``; the socket's own timeout restarts with every byte."""
    pieces = []
    while piece := response.read1(65536):
        pieces.append(piece)
        if time.monotonic() > end:
            raise TimeoutError("the answer took too long")
    if response.length:  # read1 does not complain
        raise ConnectionError("the answer broke off")
    return b"".join(pieces).decode("utf-8", "replace")


def _fits(answer: Any, values: int | None) -> bool:
    return values is None or len(answer) == values


def finite(value: Any) -> float | None:
    """A finite number, or a text that is one, as a float; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):  # OverflowError: a JSON integer may be larger than any float
        return None
    return number if math.isfinite(number) else None
