"""The models of ``turnkey.agent.models``, and those that stand in for the policy: a server, and a script of replies.

Requests that name one of the former are forwarded unchanged. They are calls of a frozen model: no turn, no row, no
credit. The log has them beside the episode.
"""

from __future__ import annotations

import json
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.http import Endpoint, EndpointConfig, on_this_machine
from verl_turnkey.plugins.gateway.codec import Messages, Parsed, Tools
from verl_turnkey.plugins.gateway.dialects import parts
from verl_turnkey.plugins.gateway.exchange import Exchange
from verl_turnkey.plugins.gateway.messages import GatewayError, Message, ToolCall, invalid
from verl_turnkey.plugins.rollout.trajectory_log import data_url

SHOWN = 2000
"""logged characters of a request's end and of a reply's beginning"""
KEY = "turnkey.agent.models"
Model = Callable[[Messages, Tools], Awaitable[Parsed]]
"""a stand-in for the policy: its turn after these messages"""
PATH = re.compile(r"(/(?!\.{1,2}(/|$))[\w.~:-]+)+", re.ASCII)
"""paths that are passed on: no part of them leads upwards or is a query"""


class Models:
    """The models by the names that requests give them; ``policy``: the policy's."""

    def __init__(self, endpoints: Mapping[str, EndpointConfig], policy: str) -> None:
        self._endpoints, self._policy = dict(endpoints), policy

    @property
    def names(self) -> list[str]:
        return list(self._endpoints)

    def named(self, body: Mapping[str, Any]) -> str | None:
        """Which model a request is for; None: the policy.

        Raises:
            GatewayError: there is no such model.
        """
        name = body.get("model")
        if name is not None and not isinstance(name, str):
            raise invalid(f"model: expected a name, got {str(name)[:80]!r}")
        if name in self._endpoints:
            return name
        if name is not None and (name == self._policy or name.startswith(f"{self._policy}/")):
            return None
        known = ", ".join([self._policy, f"{self._policy}/<role>", *self._endpoints])
        raise GatewayError(404, "model_not_found", f"there is no model {str(name)[:80]!r}: known are {known} ({KEY})")

    async def answer(self, name: str, path: str, body: Mapping[str, Any], exchange: Exchange) -> dict[str, Any]:
        """Let a model answer, in parts as they come if it streams; what the log has of the call.

        ``path``: below ``/v1``, such as ``/chat/completions``.

        Raises:
            GatewayError: it cannot be reached, or answers with an error. The policy is not asked in its place.
            Gone: the client has closed the connection.
        """
        import httpx

        endpoint = self._endpoints[name]
        if not PATH.fullmatch(path):
            raise invalid(f"expected a path below /v1, got {path[:80]!r}")
        key, where = _key(name, endpoint), f"the model {name!r} at {endpoint.url} ({KEY})"

        def without_key(text: str) -> str:
            return text.replace(key, "***") if key else text

        sent = json.dumps({**body, "model": endpoint.model}, ensure_ascii=False)
        headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        started, reply = perf_counter(), bytearray()
        try:
            async with (
                httpx.AsyncClient(
                    verify=_certificates(), timeout=endpoint.timeout, trust_env=not on_this_machine(endpoint.url)
                ) as client,
                client.stream(
                    "POST", endpoint.url.rstrip("/") + path, content=sent.encode("utf-8", "replace"), headers=headers
                ) as response,
            ):
                kind = response.headers.get("content-type", "application/json")
                if response.status_code != 200:
                    text = without_key((await response.aread()).decode("utf-8", "replace"))
                    status = response.status_code if response.status_code >= 400 else 502
                    raise GatewayError(status, "model_failed", f"{where} answers {response.status_code}: {text[:200]}")
                if kind.startswith("text/event-stream"):
                    async for part in response.aiter_bytes():
                        reply += part[: max(0, 4 * SHOWN - len(reply))]
                        await exchange.part(part, kind)
                    await exchange.part(None, kind)
                else:
                    reply += await response.aread()
                    await exchange.whole(200, bytes(reply), kind)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            words = without_key(f"{where} gives no answer: {type(error).__name__}: {error}")
            raise GatewayError(503, "model_failed", words) from None
        text = without_key(reply[: 4 * SHOWN].decode("utf-8", "replace"))[:SHOWN]
        seconds = round(perf_counter() - started, 3)
        return {"path": path, "request": without_key(sent)[-SHOWN:], "reply": text, "seconds": seconds}


def _key(name: str, endpoint: EndpointConfig) -> str:
    variable = endpoint.api_key_env
    key = os.environ.get(variable, "").strip() if variable else ""
    if variable and not (key and key.isascii() and key.isprintable()):
        words = f"the model {name!r} needs an API key in ASCII: set the environment variable {variable} on every node"
        raise GatewayError(503, "model_failed", words)
    return key


@cache
def _certificates() -> ssl.SSLContext:
    """Read once: httpx would read it for every request."""
    return ssl.create_default_context()


class Server:
    """A model behind an OpenAI-compatible server, in the place of the policy.

    Args:
        url: such as http://host:8000/v1.
        model: its name there.
        api_key_env: environment variable with the key; None: no key is sent.
    """

    def __init__(self, url: str, model: str, api_key_env: str | None = None) -> None:
        self._endpoint = Endpoint(
            EndpointConfig(url, model, api_key_env, timeout=600.0, retries=2, cache_size=0),
            "/chat/completions",
            who="the model's server",
            expected="a chat completion",
            read=_message_of,
        )

    async def __call__(self, messages: Messages, tools: Tools) -> Parsed:
        question: dict[str, Any] = {"messages": [_sent(message) for message in messages]}
        message = await self._endpoint.ask(question | ({"tools": [*tools]} if tools else {}))
        calls = tuple(
            ToolCall(call["function"]["name"], parts.arguments(call["function"]["arguments"]), "")
            for call in message.get("tool_calls") or ()
        )
        reasoning = message.get("reasoning_content") or message.get("reasoning") or None
        return Parsed(message.get("content") or "", calls, reasoning)


def _sent(message: Message) -> dict[str, Any]:
    """A message as Chat Completions has it."""
    pictures = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in message.images]
    content = [*pictures, {"type": "text", "text": message.text}]
    sent: dict[str, Any] = {"role": message.role, "content": content if message.images else message.text}
    if message.calls:
        sent["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": parts.spelled(call)}}
            for call in message.calls
        ]
    if message.role == "tool":
        sent["tool_call_id"] = message.call_id
    return sent


def _message_of(answer: Any) -> dict[str, Any] | None:
    message = answer["choices"][0]["message"]
    json.dumps(message)
    return message if isinstance(message, dict) else None


# --- a script in the place of the policy ------------------------------------------------------------------------------

EXAMPLES: Mapping[str, Any] = {"string": "example", "integer": 1, "number": 1.0, "boolean": True, "array": []}
"""arguments of the built-in script, by the type in the tool's schema"""
DONE = Parsed("ok")


class Script:
    """Replies in their order. After the last one, or without any, it calls the first tool once and then answers ``ok``.

    Args:
        replies: see :func:`read_replies`.
    """

    def __init__(self, replies: Sequence[Parsed] = ()) -> None:
        self._replies = list(replies)

    async def __call__(self, messages: Messages, tools: Tools) -> Parsed:
        if self._replies:
            return self._replies.pop(0)
        if not tools or any(message.calls for message in messages):
            return DONE
        function = tools[0]["function"]
        return Parsed("", (ToolCall(function["name"], example(function.get("parameters") or {}), ""),))


def read_replies(file: Path) -> list[Parsed]:
    """The replies of a script: a JSON or YAML list, whose entries are texts or mappings.

    A mapping has ``text``, ``reasoning`` and ``calls``, a list of ``{"name": ..., "arguments": {...}}``.

    Raises:
        ConfigError: the file has another form.
    """
    try:
        entries = yaml.safe_load(read_text(file))
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: neither JSON nor YAML ({str(error)[:200]})") from None
    if not isinstance(entries, list):
        raise ConfigError(f"{file}: expected a list of replies, got {type(entries).__name__}")
    return [_reply(entry, f"{file}, reply {number}") for number, entry in enumerate(entries)]


def _reply(entry: Any, where: str) -> Parsed:
    if isinstance(entry, str):
        return Parsed(entry)
    if not isinstance(entry, Mapping) or not entry.keys() <= {"text", "reasoning", "calls"}:
        raise ConfigError(f"{where}: expected text, or a mapping of text, reasoning and calls, got {str(entry)[:80]}")
    calls = entry.get("calls") or []
    for call in calls:
        if not isinstance(call, Mapping) or not isinstance(call.get("arguments", {}), Mapping) or "name" not in call:
            raise ConfigError(f"{where}: expected calls of name and arguments, got {str(call)[:80]}")
    made = tuple(ToolCall(str(call["name"]), dict(call.get("arguments") or {}), "") for call in calls)
    return Parsed(str(entry.get("text") or ""), made, entry.get("reasoning"))


def example(schema: Mapping[str, Any]) -> Any:
    """A value that a JSON schema takes, as far as its types, choices and defaults tell."""
    if "enum" in schema or "const" in schema:
        return schema["const"] if "const" in schema else schema["enum"][0]
    if "default" in schema:
        return schema["default"]
    choices = schema.get("anyOf") or schema.get("oneOf")
    if choices:
        return example(choices[0])
    kind = schema.get("type", "object" if "properties" in schema else "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        properties = schema.get("properties") or {}
        return {name: example(properties.get(name) or {}) for name in schema.get("required") or ()}
    return EXAMPLES.get(kind)
