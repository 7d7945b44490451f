"""Parsers of tool calls (``actor_rollout_ref.rollout.multi_turn.format``): verl's, vLLM's, and those of a user's own.

Schemas of tools reach a parser as they are: verl's own classes for them refuse ``anyOf`` and lose other keywords.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, Protocol

from verl.experimental.agent_loop.tool_parser import ToolParser

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.plugins.config.schema import closest
from verl_turnkey.plugins.rollout.call_families import ENDS, READERS, Reader
from verl_turnkey.plugins.rollout.call_markup import BEGINS, UNREADABLE, TurnText, WrittenCall, begun

KEY = "actor_rollout_ref.rollout.multi_turn.format"
VLLM = "vllm:"
CALL_ID = "[CALL_ID]"
"""what Mistral's models of 2025 write between a call's name and its id, which vLLM takes for one name"""


class CallParser(Protocol):
    """Reads the tool calls in what a turn says after its thoughts."""

    stop_token_ids: Sequence[int]
    """ids that end a turn with a call"""

    async def read(self, ids: list[int], tools: Sequence[Mapping[str, Any]], cut: bool = False) -> TurnText:
        """The calls of a turn, and the text beside them. Callers catch what a parser raises on a model's text.

        ``cut``: the limit of tokens ended the turn.
        """
        ...


def call_parser(name: str, tokenizer: Any) -> CallParser:
    """The parser of :data:`KEY`: a name of verl's, ``vllm:<name>``, or ``module:Class`` with verl's interface.

    Raises:
        ConfigError: no such parser, or it does not suit the tokenizer.
    """
    check_tool_parser(name)
    if name.startswith(VLLM):
        parser: CallParser = _VllmParser(name, tokenizer)
    else:
        parser = _VerlParser((_own(name) if ":" in name else ToolParser._registry[name])(tokenizer), tokenizer)
    return _MarkupParser(READERS[name], tokenizer, parser.stop_token_ids) if _is_stock(name) else parser


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


def _own(name: str) -> Any:
    return load_function(name, KEY)


def _is_stock(name: str) -> bool:
    """Whether the markup is a family's, and no user has registered a parser of that name."""
    kind = ToolParser._registry.get(name)
    return name in READERS and (kind is None or kind.__module__ == ToolParser.__module__)


class _MarkupParser:
    """Reads a family's markup by our own reader: verl's and vLLM's take what is not closed, or guess types."""

    def __init__(self, reader: Reader, tokenizer: Any, stop_token_ids: Sequence[int]) -> None:
        self._reader, self._tokenizer, self.stop_token_ids = reader, tokenizer, stop_token_ids

    async def read(self, ids: list[int], tools: Sequence[Mapping[str, Any]], cut: bool = False) -> TurnText:
        return self._reader(self._tokenizer.decode(ids, skip_special_tokens=False))


class _VerlParser:
    def __init__(self, parser: Any, tokenizer: Any) -> None:
        self._parser, self._tokenizer = parser, tokenizer
        self.stop_token_ids: Sequence[int] = [i for i in getattr(parser, "stop_token_ids", ()) if i is not None]

    async def read(self, ids: list[int], tools: Sequence[Mapping[str, Any]], cut: bool = False) -> TurnText:
        views = [_view(tool["function"]) for tool in tools]
        turn = await self._read(ids, views)
        if cut and turn.calls:  # its markup is its own: what may go on is not closed
            further = [*ids, *self._tokenizer.encode(MORE, add_special_tokens=False)]
            turn = replace(turn, finished=not _grows(turn.calls, (await self._read(further, views)).calls))
        return _with_unread(turn, self._tokenizer.decode(ids, skip_special_tokens=False))

    async def _read(self, ids: list[int], views: list[Any]) -> TurnText:
        text, calls = await self._parser.extract_tool_calls(ids, views)
        return TurnText(
            text, [WrittenCall(call.name, call.arguments, getattr(call, "tool_call_id", None)) for call in calls]
        )


class _VllmParser:
    stop_token_ids: Sequence[int] = ()

    def __init__(self, name: str, tokenizer: Any) -> None:
        self._kind, self._tokenizer = _of_vllm().get_tool_parser(name.removeprefix(VLLM)), _with_vocabulary(tokenizer)
        self._ends = ENDS.get(name)
        try:
            self._kind(self._tokenizer)
        except Exception as error:  # each has its own for a tokenizer without its tokens
            raise ConfigError(f"{KEY}={name} does not suit this model's tokenizer: {error}") from error
        # They log a traceback for each call that they cannot read, which a record counts as unparsed.
        for logger in ("vllm.tool_parsers", "vllm.parser"):
            logging.getLogger(logger).setLevel(logging.CRITICAL)

    async def read(self, ids: list[int], tools: Sequence[Mapping[str, Any]], cut: bool = False) -> TurnText:
        return await asyncio.to_thread(self._read, ids, tools)

    def _read(self, ids: list[int], tools: Sequence[Mapping[str, Any]]) -> TurnText:
        whole = self._tokenizer.decode(ids, skip_special_tokens=False)
        if self._ends is not None:
            begin, end = self._ends
            if whole.rfind(begin) > whole.rfind(end) or (begin in whole and begun(whole, begin)):
                return TurnText(whole, finished=False)
        text, calls = self._parsed(ids, tools)
        ended = ids[: next((n for n in range(len(ids), 0, -1) if ids[n - 1] != self._tokenizer.eos_token_id), 0)]
        further = [*ended, *self._tokenizer.encode(MORE, add_special_tokens=False)]
        finished = not calls or not _grows(calls, self._parsed(further, tools)[1])
        return _with_unread(TurnText(text, calls, finished), whole)

    def _parsed(self, ids: list[int], tools: Sequence[Mapping[str, Any]]) -> tuple[str, list[WrittenCall]]:
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


MORE = "1"
"""how any call may go on that is not closed"""


def _grows(calls: Sequence[WrittenCall], further: Sequence[WrittenCall]) -> bool:
    """Whether calls change if the turn goes on."""
    return len(further) >= len(calls) and any(
        (call.name, call.arguments) != (other.name, other.arguments)
        for call, other in zip(calls, further, strict=False)
    )


def _with_unread(turn: TurnText, whole: str) -> TurnText:
    """``turn`` with the calls of its ``whole`` text that its parser has not read."""
    unread = len(BEGINS.findall(whole)) - len(turn.calls)
    return replace(turn, calls=[*turn.calls, *[WrittenCall("", "", error=UNREADABLE)] * unread])


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
