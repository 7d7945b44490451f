"""Tool calls of a turn: the parser of a model's format, and which of the calls run."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from types import SimpleNamespace
from typing import Any, Protocol

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from verl.experimental.agent_loop.tool_parser import ToolParser

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.answers import plain_text
from verl_turnkey.envs.prompting.actions import Call
from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.plugins.config.schema import closest
from verl_turnkey.plugins.rollout.call_markup import (
    BEGINS,
    ENDS,
    NUMBERS,
    READERS,
    UNREADABLE,
    Number,
    Reader,
    TurnText,
    Written,
    WrittenCall,
    begun,
)

# Parsers of tool calls (``actor_rollout_ref.rollout.multi_turn.format``): verl's, vLLM's, and those of a user's own.
#
# Schemas of tools reach a parser as they are: verl's own classes for them refuse ``anyOf`` and lose other keywords.

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
        kind: Any = load_function(name, KEY) if ":" in name else ToolParser._registry[name]
        parser = _VerlParser(kind(tokenizer), tokenizer)
    registered = ToolParser._registry.get(name)
    # A parser that a user registered under the name of a family reads its turns itself.
    if name in READERS and (registered is None or registered.__module__ == ToolParser.__module__):
        return _MarkupParser(READERS[name], tokenizer, parser.stop_token_ids)
    return parser


def check_tool_parser(name: str) -> None:
    """Raise ConfigError unless there is a tool parser of that name."""
    if name.startswith(VLLM):
        wanted, names = name.removeprefix(VLLM), _of_vllm().list_registered()
        if wanted not in names:
            raise ConfigError(f"{KEY}={name} is not a tool parser of vLLM's{closest(wanted, list(names))}")
    elif ":" in name:
        if not callable(getattr(load_function(name, KEY), "extract_tool_calls", None)):
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
    properties = {name: _property(schema) for name, schema in (parameters.get("properties") or {}).items()}
    schema = SimpleNamespace(properties=properties, required=parameters.get("required") or [])
    return SimpleNamespace(
        type="function", function=SimpleNamespace(name=function["name"], description="", parameters=schema)
    )


def _property(schema: Any) -> SimpleNamespace:
    """A parameter with one type, to which parsers convert text; of several (``int | None``), the first but null."""
    schema = schema if isinstance(schema, Mapping) else {}

    def model_dump(**_: Any) -> dict[str, Any]:  # a schema may be malformed: read it only for a parser that asks
        kinds = [schema, *(kind for several in ("anyOf", "oneOf") for kind in schema.get(several) or ())]
        types = [kind.get("type") for kind in kinds if isinstance(kind, Mapping)]
        flat = [name for type_ in types for name in (type_ if isinstance(type_, list) else [type_])]
        return {**schema, "type": next((name for name in flat if name not in (None, "null")), "string")}

    return SimpleNamespace(model_dump=model_dump)


SHOWN = 3
"""errors of a call's arguments that the model is shown"""
NOT_FINISHED = "the tool call is not finished"
AT_LIMIT = "the turn reached its limit of tokens"


@dataclass(frozen=True)
class TurnCalls:
    """The calls of a turn."""

    text: str
    """beside the calls"""
    calls: tuple[Call, ...] = ()
    """in their order; an ``error`` says why a call does not run, and one without a name cannot be read"""
    broken: str | None = None
    """why none of them runs, whatever it says"""

    @property
    def named(self) -> tuple[Call, ...]:
        return tuple(call for call in self.calls if call.name)

    @property
    def refused(self) -> Call | None:
        """The first call that does not run."""
        return next((call for call in self.calls if call.error is not None), None)


async def read_calls(parser: CallParser, ids: list[int], tools: Tools, cut: bool = False) -> TurnCalls:
    """The calls in what a turn says after its thoughts.

    If a call is begun and not closed in the markup of its family, none of the turn runs: what the model would have gone
    on to write is unknown.

    Args:
        cut: the limit of tokens ended the turn.
    """
    try:
        turn = await parser.read(ids, tools.schemas, cut)
    except Exception as error:  # parsers may raise anything on what the model wrote
        return TurnCalls("", broken=f"the tool parser raised {type(error).__name__}: {str(error)[:200]}")
    broken = None if turn.finished else f"{NOT_FINISHED}: {AT_LIMIT if cut else 'it is not closed'}"
    return TurnCalls(turn.text, tuple(map(tools.check, turn.calls)), broken)


class Tools:
    """Checks calls against the schemas of an episode's tools.

    Args:
        schemas: ``{"type": "function", "function": {...}}`` each, as ``envs.tool_info.read_tools`` gives them.
        strict: whether each must have a JSON Schema; else a tool whose schema cannot be used takes any arguments.

    Raises:
        EnvironmentFailure: the parameters of a tool are not a JSON Schema.
    """

    def __init__(self, schemas: Sequence[dict[str, Any]], strict: bool = True) -> None:
        self.schemas, self._strict = list(schemas), strict
        self._validators: dict[str, Draft202012Validator] = {}
        for schema in schemas:
            function = schema["function"]
            parameters = function.get("parameters") or {}
            try:
                Draft202012Validator.check_schema(parameters)
            except SchemaError as error:
                if strict:
                    words = f"the parameters of the tool {function['name']!r} are not a JSON Schema: {error.message}"
                    raise EnvironmentFailure("tools", words) from None
                parameters = {}
            self._validators[function["name"]] = Draft202012Validator(parameters)

    def check(self, written: WrittenCall) -> Call:
        """The call with its arguments, or with the error that the model is shown in place of a result."""

        def refused(error: str, arguments: Mapping[str, Any] | None = None, readable: bool = False) -> Call:
            return Call(written.name, arguments or {}, written.id, error, "admissible" if readable else "format")

        if not written.name:
            return refused(written.error or UNREADABLE)
        validator = self._validators.get(written.name)
        if validator is None:
            readable = _readable(written.arguments)
            words = f"there is no tool {written.name[:80]!r}; the tools are {', '.join(self._validators)}"
            return refused(words, readable, readable is not None)
        if written.error is not None:
            return refused(written.error)
        try:
            arguments = _read(written.arguments)
        except (ValueError, RecursionError) as error:
            return refused(f"the arguments of {written.name} are not JSON: {str(error)[:200]}")
        if not isinstance(arguments, Mapping):
            return refused(f"the arguments of {written.name} must be a JSON object, not {str(arguments)[:80]}")
        try:
            arguments = {plain_text(k): _value(_schema_of(validator, k), value) for k, value in arguments.items()}
            errors = [_message(error) for error, _ in zip(validator.iter_errors(arguments), range(SHOWN), strict=False)]
        except OverflowError as error:
            return refused(f"the arguments of {written.name} are not JSON: {error}")
        except Exception as error:  # of what the model nested, or of a `$ref` to nowhere
            readable = _readable(arguments)
            checked = not self._strict and readable is not None
            errors, arguments = [] if checked else [f"they cannot be checked: {type(error).__name__}"], readable or {}
        if errors:
            return refused(f"the arguments of {written.name} do not fit: {'; '.join(errors)}", arguments, readable=True)
        return Call(written.name, arguments, written.id)


def tools_of(schemas: Sequence[Mapping[str, Any]], strict: bool = True) -> Tools:
    """The tools of an episode; made once for all episodes that have the same ones."""
    return _tools(json.dumps(schemas), strict)


@lru_cache(maxsize=64)
def _tools(text: str, strict: bool) -> Tools:
    return Tools(json.loads(text), strict)


def _read(arguments: str | Mapping[str, Any]) -> Any:
    return json.loads(arguments or "{}", **NUMBERS) if isinstance(arguments, str) else arguments


def _readable(arguments: str | Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Arguments without a schema; None: they are not JSON."""
    try:
        read = _read(arguments)
        return {plain_text(k): _value(None, value) for k, value in read.items()} if isinstance(read, Mapping) else None
    except (ValueError, RecursionError, OverflowError):
        return None


def _schema_of(validator: Draft202012Validator, name: str) -> Any:
    """The validator of a parameter; None: its schema says nothing."""
    schema = validator.schema
    if not isinstance(schema, Mapping):
        return None
    kind = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
    of_value = validator.evolve(schema=kind) if isinstance(kind, Mapping) else None
    anything = of_value is None or all(of_value.is_valid(value) for value in (None, True, 0.5, "", [], {}))
    return None if anything else of_value


def _value(schema: Any, value: Any) -> Any:
    """``value`` as its schema wants it, where what the model wrote can be only that.

    Raises:
        OverflowError: a number that JSON does not have.
    """
    if isinstance(value, Written):
        return _of_text(schema, value)
    plain = _plain(value)
    if schema is None or schema.is_valid(plain) or not isinstance(value, str):
        return plain
    # A number may be the text of a number, and a text may be JSON: parsers of formats without types confuse the two.
    other = str(value) if isinstance(value, Number) else _from_json(value)
    return other if schema.is_valid(other) else plain


def _of_text(schema: Any, written: Written) -> Any:
    """What the text of a format without types stands for: itself, if the schema takes a text."""
    text = written.text
    python = {"true": True, "false": False}.get(text.strip().lower()) if not written.as_json else None
    parsed = _from_json(text) if python is None else python
    if schema is None:
        return parsed if written.as_json or parsed is None else text
    if parsed is None and schema.is_valid(None):
        return None
    return text if schema.is_valid(text) or not schema.is_valid(parsed) else parsed


def _from_json(text: str) -> Any:
    """The value of a JSON text, or the text."""
    try:
        return _plain(json.loads(text, **NUMBERS))
    except (ValueError, RecursionError, OverflowError):
        return text


def _plain(value: Any) -> Any:
    """``value`` with numbers in the place of their texts, and no half surrogate pair, which JSON can spell."""
    if isinstance(value, str):
        return value.value if isinstance(value, Number) else plain_text(value)
    if isinstance(value, Mapping):
        return {plain_text(name): _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _message(error: ValidationError) -> str:
    where = ".".join(str(part) for part in error.absolute_path)
    message = error.message if len(error.message) <= 200 else f"{error.message[:200]}..."
    return f"{where}: {message}" if where else message
