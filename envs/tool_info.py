"""``info["tools"]`` and ``info["results"]``: the tools of an environment, and what its calls returned."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

TOOLS, RESULTS = "info['tools']", "info['results']"


def read_tools(value: Any) -> list[dict[str, Any]]:
    """The tools of an environment, ``{"type": "function", "function": {...}}`` each, as plain JSON.

    A function has a ``name``; a missing ``description`` is empty, missing ``parameters`` are those of a function that
    takes none. Every keyword of JSON Schema stays as it is.

    Raises:
        TypeError: names the tool, and what it lacks.
    """
    tools = _json(value, TOOLS)
    if not isinstance(tools, list):
        raise TypeError(f"{TOOLS} must be a list of function schemas, not {_short(value)}")
    for n, tool in enumerate(tools):
        where = f"{TOOLS}[{n}]"
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict):
            raise TypeError(f"{where} must be {{'type': 'function', 'function': {{...}}}}, not {_short(tool)}")
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise TypeError(f"{where} must have a name, not {_short(function.get('name'))}")
        if not isinstance(function.setdefault("description", ""), str):
            raise TypeError(f"the description of {where} must be text, not {_short(function['description'])}")
        parameters = function.setdefault("parameters", {"type": "object", "properties": {}})
        if not isinstance(parameters, dict) or not isinstance(parameters.setdefault("properties", {}), dict):
            raise TypeError(f"the parameters of {where} must be a JSON schema of an object, not {_short(parameters)}")
    names = [tool["function"]["name"] for tool in tools]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise TypeError(f"{TOOLS} has several tools of the name {twice[0]!r}")
    return tools


def read_results(value: Any) -> list[dict[str, Any]]:
    """The results of a step's calls, ``{"content": str, "is_error": bool}`` each, in the order of the calls.

    Raises:
        TypeError: a result of another form.
    """
    results = _json(value, RESULTS)
    if not isinstance(results, list):
        raise TypeError(f"{RESULTS} must be a list with one result per call, not {_short(value)}")
    for n, result in enumerate(results):
        if not (
            isinstance(result, dict)
            and isinstance(result.get("content"), str)
            and isinstance(result.setdefault("is_error", False), bool)
        ):
            raise TypeError(f"{RESULTS}[{n}] must be {{'content': text, 'is_error': bool}}, not {_short(result)}")
    return results


def calls_text(calls: list[tuple[str, Mapping[str, Any]]]) -> str:
    """The calls of a turn as ``step`` gets them: canonical JSON, with sorted keys and without spaces.

    ``calls``: names and arguments.
    """
    listed = [{"name": name, "arguments": dict(arguments)} for name, arguments in calls]
    return _canonical({"calls": listed})


def words_text(text: str) -> str:
    """A turn without calls, as ``step`` gets it."""
    return _canonical({"text": text})


def random_call(tools: Sequence[Mapping[str, Any]], rng: Random) -> str:
    """A call of one of the tools as ``step`` gets it, with random arguments of the types that its schema asks for."""
    function = rng.choice(tools)["function"]
    properties = function["parameters"]["properties"]
    return calls_text([(function["name"], {name: _random(schema, rng) for name, schema in properties.items()})])


def _random(schema: Any, rng: Random) -> Any:
    schema = schema if isinstance(schema, Mapping) else {}
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    if several := schema.get("anyOf") or schema.get("oneOf"):
        return _random(rng.choice(several), rng)
    kind = schema.get("type", "string")
    values = {
        "integer": rng.randint(0, 3),
        "number": round(rng.random(), 2),
        "boolean": rng.random() < 0.5,
        "array": [],
        "object": {},
        "null": None,
    }
    return values.get(rng.choice(kind) if isinstance(kind, list) else kind, "a")


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _json(value: Any, what: str) -> Any:
    """A copy in the types of JSON, with half surrogate pairs replaced."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} must hold nothing but JSON: {error}") from None
    return json.loads(text.encode("utf-8", "replace").decode("utf-8"))


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else f'{text[:80]}...'}"
