"""Parsers of tool calls (``actor_rollout_ref.rollout.multi_turn.format``): verl's, vLLM's, and those of a user's own.

Schemas of tools reach a parser as they are: verl's own classes for them refuse ``anyOf`` and lose other keywords.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any, Protocol

from verl.experimental.agent_loop.tool_parser import ToolParser

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.plugins.config.schema import closest

KEY = "actor_rollout_ref.rollout.multi_turn.format"
VLLM = "vllm:"
CALL_ID = "[CALL_ID]"
"""what Mistral's models of 2025 write between a call's name and its id, which vLLM takes for one name"""
HARMONY = "gpt-oss"
HARMONY_CALL = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=functions\.([\w.-]+))?<\|channel\|>\w+(?: to=functions\.([\w.-]+))?"
    r" ?(?:<\|constrain\|>)?(?:json)?<\|message\|>"
)
"""how a tool call begins in the harmony format: gpt-oss has the tool's name in the channel or, as in its chat template,
before it, and the generation prompt has the first ``<|start|>assistant``"""
BEGINS = re.compile(
    r"<tool_call>|<\|tool_call>|<\|tool_call_begin\|>|<｜tool▁call▁begin｜>|<seed:tool_call>|<minimax:tool_call>"
    r"|<｜DSML｜invoke|\[TOOL_CALLS\]|<\|python_tag\|>|<function_call>|<\|tool_calls\|>|to=functions\."
    r'|\A\s*\[?\{\s*"name"\s*:'
)
"""what begins a tool call, in all families: a turn with more of these than calls has a call that cannot be read"""


@dataclass(frozen=True)
class WrittenCall:
    """A call as the model wrote it: its arguments are JSON, or should be."""

    name: str
    arguments: str
    id: str | None = None
    """the model's own, in families that write one"""


class CallParser(Protocol):
    """Reads the tool calls in what a turn says after its thoughts."""

    stop_token_ids: Sequence[int]
    """ids that end a turn with a call"""

    async def read(self, ids: list[int], tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[WrittenCall]]:
        """The text beside the calls, and the calls in order. Callers catch what a parser raises on a model's text."""
        ...


def call_parser(name: str, tokenizer: Any) -> CallParser:
    """The parser of :data:`KEY`: a name of verl's, ``vllm:<name>``, or ``module:Class`` with verl's interface.

    Raises:
        ConfigError: no such parser, or it does not suit the tokenizer.
    """
    check_tool_parser(name)
    if name.startswith(VLLM):
        return _VllmParser(name, tokenizer)
    kind = _own(name) if ":" in name else ToolParser._registry[name]
    return _VerlParser(kind(tokenizer), tokenizer, harmony=name == HARMONY)


def check_tool_parser(name: str) -> None:
    """Raise ConfigError unless there is a tool parser of that name."""
    if name.startswith(VLLM):
        wanted, known = name.removeprefix(VLLM), _of_vllm().list_registered()
        if wanted not in known:
            raise ConfigError(f"{KEY}={name} is not a tool parser of vLLM's{closest(wanted, list(known))}")
    elif ":" in name:
        if not callable(getattr(_own(name), "extract_tool_calls", None)):
            raise ConfigError(
                f"{KEY}={name} must be a class made with a tokenizer, with verl's method `async "
                "extract_tool_calls(ids, tools)`, which returns the text and a list of calls with name and arguments, "
                "as JSON text"
            )
    elif name not in ToolParser._registry:
        raise ConfigError(
            f"{KEY}={name} is not a tool parser of verl's{closest(name, list(ToolParser._registry))} vLLM's are "
            f"{VLLM}<name>, one of your own is module:Class"
        )


def unread_calls(text: str, read: int) -> int:
    """How many tool calls of ``text``, with its control tokens, are not among the ``read`` ones."""
    return max(0, len(BEGINS.findall(text)) - read)


def _own(name: str) -> Any:
    return load_function(name, KEY)


class _VerlParser:
    def __init__(self, parser: Any, tokenizer: Any, harmony: bool = False) -> None:
        self._parser, self._tokenizer, self._harmony = parser, tokenizer, harmony
        self.stop_token_ids: Sequence[int] = getattr(parser, "stop_token_ids", ())

    async def read(self, ids: list[int], tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[WrittenCall]]:
        if self._harmony:
            ids = self._tokenizer.encode(_harmony_calls(self._tokenizer.decode(ids)), add_special_tokens=False)
        text, calls = await self._parser.extract_tool_calls(ids, [_view(tool["function"]) for tool in tools])
        return text, [WrittenCall(call.name, call.arguments, getattr(call, "tool_call_id", None)) for call in calls]


class _VllmParser:
    stop_token_ids: Sequence[int] = ()

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._kind, self._tokenizer = _of_vllm().get_tool_parser(name.removeprefix(VLLM)), _with_vocabulary(tokenizer)
        try:
            self._kind(self._tokenizer)
        except Exception as error:  # each has its own for a tokenizer without its tokens
            raise ConfigError(f"{KEY}={name} does not suit this model's tokenizer: {error}") from error
        # They log a traceback for each call that they cannot read, which a record counts as unparsed.
        for logger in ("vllm.tool_parsers", "vllm.parser"):
            logging.getLogger(logger).setLevel(logging.CRITICAL)

    async def read(self, ids: list[int], tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[WrittenCall]]:
        return await asyncio.to_thread(self._read, ids, tools)

    def _read(self, ids: list[int], tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[WrittenCall]]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam

        tool_params = [ChatCompletionToolsParam.model_validate(tool) for tool in tools]
        parser = self._kind(self._tokenizer, tool_params)  # it keeps a state of what it has read
        request = parser.adjust_request(ChatCompletionRequest.model_validate({"messages": [], "tools": tools}))
        text = self._tokenizer.decode(ids, skip_special_tokens=request.skip_special_tokens)
        parsed = parser.extract_tool_calls(text.lstrip(), request)  # some look for calls at the very beginning
        calls = []
        for call in parsed.tool_calls:
            name, _, call_id = call.function.name.partition(CALL_ID)
            # Mistral's templates take no other length; most parsers draw an id by lot.
            call_id = call_id if len(call_id) == 9 else call.id
            calls.append(WrittenCall(name, call.function.arguments, call_id if call_id in text else None))
        return parsed.content or "", calls


@cache
def _with_vocabulary(tokenizer: Any) -> Any:
    """The tokenizer with its vocabulary at hand: vLLM's parsers look it up when they are made, for a second."""
    vocabulary, cached = tokenizer.get_vocab(), copy.copy(tokenizer)
    cached.get_vocab = lambda: vocabulary
    return cached


def _of_vllm() -> Any:
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigError(f"{KEY}={VLLM}<name> needs a vLLM with the module vllm.tool_parsers: {error}") from None
    return ToolParserManager


def _view(function: Mapping[str, Any]) -> SimpleNamespace:
    """A function as verl's parsers look at it, whatever keywords its schema has."""
    parameters = function.get("parameters") or {}
    properties = {name: _Property(schema) for name, schema in (parameters.get("properties") or {}).items()}
    schema = SimpleNamespace(properties=properties, required=parameters.get("required") or [])
    return SimpleNamespace(
        type="function", function=SimpleNamespace(name=function["name"], description="", parameters=schema)
    )


class _Property:
    def __init__(self, schema: Any) -> None:
        self._schema = schema if isinstance(schema, Mapping) else {}

    def model_dump(self, **_: Any) -> dict[str, Any]:
        return {**self._schema, "type": self._type()}

    def _type(self) -> Any:
        """One type, which parsers convert text to: of several, as in ``int | None``, the first that is not null."""
        kinds = [self._schema.get("type")]
        for several in ("anyOf", "oneOf"):
            kinds += [kind.get("type") for kind in self._schema.get(several) or () if isinstance(kind, Mapping)]
        flat = [name for kind in kinds for name in (kind if isinstance(kind, list) else [kind])]
        return next((kind for kind in flat if kind not in (None, "null")), "string")


def _harmony_calls(text: str) -> str:
    """``text`` with all its calls in the one spelling that verl's parser of gpt-oss reads."""

    def spelled(header: re.Match[str]) -> str:
        name = header[1] or header[2]
        call = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return call if name else header[0]

    return HARMONY_CALL.sub(spelled, text)
