"""The tools of an episode: which calls of them may run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.answers import read_json
from verl_turnkey.envs.prompting.actions import Call
from verl_turnkey.plugins.rollout.tool_parsers import WrittenCall

SHOWN = 3
"""errors of a call's arguments that the model is shown"""


class Tools:
    """Checks calls against the schemas of an episode's tools.

    Args:
        schemas: ``{"type": "function", "function": {...}}`` each, as ``envs.tool_info.read_tools`` gives them.

    Raises:
        EnvironmentFailure: the parameters of a tool are not a JSON Schema.
    """

    def __init__(self, schemas: Sequence[dict[str, Any]]) -> None:
        self.schemas = list(schemas)
        self._validators: dict[str, Draft202012Validator] = {}
        for schema in schemas:
            function = schema["function"]
            try:
                Draft202012Validator.check_schema(function["parameters"])
            except SchemaError as error:
                raise EnvironmentFailure(
                    "tools", f"the parameters of the tool {function['name']!r} are not a JSON Schema: {error.message}"
                ) from None
            self._validators[function["name"]] = Draft202012Validator(function["parameters"])

    def check(self, written: WrittenCall) -> Call:
        """The call with its arguments, or with the error that the model is shown in place of a result."""

        def refused(error: str, arguments: Mapping[str, Any] | None = None, readable: bool = False) -> Call:
            return Call(written.name, arguments or {}, written.id, error, "admissible" if readable else "format")

        validator = self._validators.get(written.name)
        if validator is None:
            return refused(
                f"there is no tool {written.name[:80]!r}; the tools are {', '.join(self._validators)}", readable=True
            )
        try:
            arguments = read_json(written.arguments or "{}", parse_constant=_no_json)
        except (ValueError, RecursionError) as error:
            return refused(f"the arguments of {written.name} are not JSON: {str(error)[:200]}")
        if not isinstance(arguments, dict):
            return refused(f"the arguments of {written.name} must be a JSON object, not {str(arguments)[:80]}")
        try:
            arguments = {name: _converted(validator, name, value) for name, value in arguments.items()}
            errors = [_message(error) for error, _ in zip(validator.iter_errors(arguments), range(SHOWN), strict=False)]
        except Exception as error:  # of what the model nested, or of a `$ref` to nowhere
            errors = [f"they cannot be checked: {type(error).__name__}"]
        if errors:
            return refused(f"the arguments of {written.name} do not fit: {'; '.join(errors)}", arguments, readable=True)
        return Call(written.name, arguments, written.id)


def tools_of(schemas: Sequence[Mapping[str, Any]]) -> Tools:
    """The tools of an episode; made once for all episodes that have the same ones."""
    return _tools(json.dumps(schemas))


@lru_cache(maxsize=64)
def _tools(text: str) -> Tools:
    return Tools(json.loads(text))


def _no_json(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _converted(validator: Draft202012Validator, name: str, value: Any) -> Any:
    """``value``; if its schema refuses it, what its text stands for, or the text of a number, if that fits.

    Parsers of formats without types take ``7`` for a text, or the text ``7`` for a number.
    """
    schema = validator.schema
    kind = schema.get("properties", {}).get(name) if isinstance(schema, Mapping) else None
    if kind is None or isinstance(value, dict | list):
        return value
    of_value = validator.evolve(schema=kind)
    if of_value.is_valid(value):
        return value
    try:
        other = json.loads(value, parse_constant=_no_json) if isinstance(value, str) else json.dumps(value)
    except (ValueError, RecursionError):
        return value
    return other if of_value.is_valid(other) else value


def _message(error: ValidationError) -> str:
    where = ".".join(str(part) for part in error.absolute_path)
    message = error.message if len(error.message) <= 200 else f"{error.message[:200]}..."
    return f"{where}: {message}" if where else message
