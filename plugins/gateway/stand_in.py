"""Models that stand in for the policy when an agent is tried out: a script, or a server. No tokenizer is needed.

A stand-in counts messages in the place of tokens: each is one id. What an agent sends, and how its requests go on after
each other, is as in training.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import yaml

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.http import Endpoint, EndpointConfig
from verl_turnkey.plugins.gateway.codec import Parsed, TurnCodec
from verl_turnkey.plugins.gateway.dialects import parts
from verl_turnkey.plugins.gateway.messages import Message, ToolCall
from verl_turnkey.plugins.rollout.episode import Generated, Prompt

Tools = Sequence[Mapping[str, Any]]
Model = Callable[[Sequence[Message], Tools], Awaitable[Parsed]]
"""the model's turn after these messages"""

EXAMPLES: Mapping[str, Any] = {"string": "example", "integer": 1, "number": 1.0, "boolean": True, "array": []}
"""arguments of the built-in script, by the type in the tool's schema"""
DONE = Parsed("ok")


class StandIn(TurnCodec):
    """A codec and a model in one, whose ids stand for messages."""

    def __init__(self, model: Model) -> None:
        self.shows_tools = True
        self.stop_token_ids = []
        self.at_least = len
        self._model = model
        self._parts: list[Any] = []

    def first(self, messages: Sequence[Message], tools: Tools, images: list[Any] | None = None) -> list[int]:
        return [self._add(tuple(tools)), *map(self._add, messages)]

    def continued(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        calls: Sequence[ToolCall],
        new: Sequence[Message],
        tools: Tools,
    ) -> list[int]:
        turn = self._parts[sampled[0]]
        if isinstance(turn, Parsed):  # its calls have ids by now
            self._parts[sampled[0]] = Message("assistant", turn.text, tuple(calls), turn.reasoning)
        return [*prompt, *sampled, *map(self._add, new)]

    async def read(
        self, ids: Sequence[int], prompt: Sequence[int], tools: Tools, stop: Sequence[str] = (), cut: bool = False
    ) -> Parsed:
        turn = self._parts[ids[0]]
        return turn if isinstance(turn, Parsed) else Parsed(turn.text, turn.calls, turn.reasoning)

    def ended(self, ids: Sequence[int]) -> bool:
        return True

    def token(self, token_id: int) -> str:
        return ""

    async def generate(self, request_id: str, prompt: Prompt, sampling: dict[str, Any]) -> Generated:
        """The turn of the model that stands in."""
        started = perf_counter()
        tools, *messages = [self._parts[number] for number in prompt.ids]
        turn = await self._model(messages, tools)
        seconds = perf_counter() - started
        return Generated([self._add(turn)], None, turn.text, {}, num_preempted=-1, seconds=seconds)

    def _add(self, part: Any) -> int:
        self._parts.append(part)
        return len(self._parts) - 1


class Script:
    """Replies in their order. After the last one, or without any, it calls the first tool once and then answers ``ok``.

    Args:
        replies: see :func:`read_replies`.
    """

    def __init__(self, replies: Sequence[Parsed] = ()) -> None:
        self._replies = list(replies)

    async def __call__(self, messages: Sequence[Message], tools: Tools) -> Parsed:
        if self._replies:
            return self._replies.pop(0)
        if not tools or any(message.calls for message in messages):
            return DONE
        function = tools[0]["function"]
        return Parsed("", (ToolCall(function["name"], example(function.get("parameters") or {}), ""),))


class Server:
    """A model behind an OpenAI-compatible server.

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

    async def __call__(self, messages: Sequence[Message], tools: Tools) -> Parsed:
        question: dict[str, Any] = {"messages": [_sent(message) for message in messages]}
        message = await self._endpoint.ask(question | ({"tools": [*tools]} if tools else {}))
        calls = tuple(
            ToolCall(call["function"]["name"], parts.arguments(call["function"]["arguments"]), "")
            for call in message.get("tool_calls") or ()
        )
        reasoning = message.get("reasoning_content") or message.get("reasoning") or None
        return Parsed(message.get("content") or "", calls, reasoning)


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


def _sent(message: Message) -> dict[str, Any]:
    """A message as Chat Completions has it."""
    sent: dict[str, Any] = {"role": message.role, "content": message.text}
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
