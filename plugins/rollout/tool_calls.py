"""Which tool calls of a turn may run: the one place that decides, for the agent loop, the gateway and an evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.answers import plain_text
from verl_turnkey.envs.prompting.actions import Call
from verl_turnkey.plugins.rollout.call_markup import NUMBERS, UNREADABLE, Number, Written, WrittenCall
from verl_turnkey.plugins.rollout.tool_parsers import CallParser

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
    calls = tuple(tools.check(call) for call in turn.calls)
    if not turn.finished:
        return TurnCalls(turn.text, calls, f"{NOT_FINISHED}: {AT_LIMIT if cut else 'it is not closed'}")
    return TurnCalls(turn.text, calls)


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
