"""Environments whose methods are tools: ``@tool`` marks a method, its signature and docstring become the schema.

An action is JSON: ``{"calls": [{"name": ..., "arguments": {...}}, ...]}``, or ``{"text": ...}`` for a turn without a
call. A model that writes plain text may write one call as ``track(parcel="P1")`` or as a JSON object with ``name`` and
``arguments``. ``info["tools"]`` of a reset has the schemas, and of a step after which the agent has others;
``info["results"]`` of a step has one result per call.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from random import Random
from typing import Any, TypeVar, get_type_hints

from verl_turnkey.envs.base import StepResult, TextEnv
from verl_turnkey.envs.errors import ToolError

_MARK = "_verl_turnkey_tool"
_FENCED = re.compile(r"\s*```\w*[ \t]*\n(.*)\n\s*```\s*", re.DOTALL)
_LONGEST_CALL = 20_000
"""characters of a call that is written as text"""
NOT_UNDERSTOOD = "Error: this is not a call of a tool."
OVER = "Error: the episode is over."
DONE = "Done."
"""result of a tool that returns None"""
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Call:
    """One call of a turn; ``arguments`` by name, or by position where a text gave them so."""

    name: str
    arguments: Any
    positional: tuple[Any, ...] = ()


@dataclass(frozen=True)
class ToolResult:
    """What a call gave: text for the model, and whether the call failed."""

    content: str
    is_error: bool = False


@dataclass(frozen=True)
class Tool:
    """A method as a tool."""

    name: str
    parameters: tuple[str, ...]
    schema: Mapping[str, Any]
    """OpenAI's form: ``{"type": "function", "function": {"name", "description", "parameters"}}``"""
    validate: Callable[[Any], dict[str, Any]]
    """from the arguments of a call to those of the method; raises ``ToolError``"""


def tool(method: F) -> F:
    """Mark a method of a :class:`ToolEnv` as a tool.

    Parameters need types (``int``, ``float``, ``str``, ``bool``, ``Literal``, ``list``, ``X | None``), which the
    schema shows and calls are checked by. The docstring up to ``Args:`` is the tool's description, lines ``name: text``
    below it describe the parameters. The method returns text, or a value that JSON can hold.
    """
    setattr(method, _MARK, True)
    return method


class ToolEnv(TextEnv):
    """Base class of environments that are played by calling tools.

    Mark the tools with :func:`tool`, and write ``begin``, which starts an episode as in :class:`TextEnv`, and
    ``result``. A tool raises ``ToolError`` for what the model did wrong: its text becomes the result of the call. Any
    other exception is a bug of the environment and ends the episode as failed. Set ``self.ended`` to end the episode
    with the present call; the later calls of its turn are not run.

    A turn is invalid if none of its calls could be run. ``info["extra"]`` counts ``tool_calls`` and ``tool_errors`` of
    the step.
    """

    ended = False
    """the present call is the last one of the episode"""
    tools_changed = False
    """after the present turn the agent has other tools"""
    _results: Sequence[ToolResult] = ()

    def result(self, observation: str) -> StepResult:
        """The state after a turn, whose results or reply ``observation`` has. Called once per turn.

        ``begin`` may call it, too, with the first observation.
        """
        raise NotImplementedError(f"{type(self).__name__} must have a method result(self, observation)")

    def reply(self, text: str) -> str:
        """The answer to a turn without a call. Raises ``ToolError``, unless a subclass answers."""
        raise ToolError("call one of the tools")

    def available(self) -> list[dict[str, Any]]:
        """The schemas of the tools that the agent has now: all, unless a subclass offers some in some states only."""
        if not (tools := self.tools()):
            raise TypeError(f"{type(self).__name__} has no tool: mark the methods that the model may call with @tool")
        return tools

    def call(self, call: Call) -> ToolResult:
        """Run a call of a turn."""
        tools = _tools(type(self))
        if call.name not in tools:
            return no_tool(call.name, tools)
        return _guarded(lambda: getattr(self, call.name)(**_arguments(tools[call.name], call)))

    @classmethod
    def tools(cls) -> list[dict[str, Any]]:
        """The schemas of all tools, in the order in which their methods are written."""
        return [json.loads(json.dumps(tool.schema)) for tool in _tools(cls).values()]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """As :meth:`TextEnv.reset`; ``info["tools"]`` has the schemas."""
        self.ended, self._results = False, ()
        observation, info = super().reset(seed=seed, options=options)
        return observation, {**info, "tools": self.available()}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """As :meth:`TextEnv.step`; ``info["results"]`` has ``{"content", "is_error"}`` of each call, in order.

        ``info["tools"]`` has the schemas of all tools where the turn changed them.
        """
        self._results, self.tools_changed = (), False
        observation, reward, terminated, truncated, info = super().step(action)
        info["results"] = [asdict(result) for result in self._results]
        if self.tools_changed:
            info["tools"] = self.available()
        return observation, reward, terminated, truncated, info

    def act(self, action: str) -> StepResult:
        turn = read_turn(action)
        if turn is None:
            return replace(self.refused(), observation=NOT_UNDERSTOOD, extra=_counts(()))
        if isinstance(turn, str):
            answers = [_guarded(lambda: self.reply(turn))]
        else:
            answers = self._results = [
                ToolResult(OVER, is_error=True) if self.ended else self.call(call) for call in turn
            ]
        state = self.result("\n".join(answer.content for answer in answers))
        invalid = state.invalid or all(answer.is_error for answer in answers)
        return replace(state, invalid=invalid, extra={**_counts(self._results), **state.extra})


def call_text(name: str, **arguments: Any) -> str:
    """A call as text, such as ``track(parcel="P1")``: an action for an oracle, or for an example in a prompt."""
    spelled = [json.dumps(v, ensure_ascii=False) if isinstance(v, str) else repr(v) for v in arguments.values()]
    return f"{name}({', '.join(f'{key}={value}' for key, value in zip(arguments, spelled, strict=True))})"


def read_turn(action: str) -> list[Call] | str | None:
    """The calls of an action, or the text of a turn without a call; None: it is neither.

    A Markdown fence around all of it does not count.
    """
    if fenced := _FENCED.fullmatch(action):
        action = fenced[1]
    try:
        turn = json.loads(action)
    except (ValueError, RecursionError):
        return _read_call(action)
    if not isinstance(turn, dict):
        return None
    if turn.keys() == {"text"} and isinstance(turn["text"], str):
        return turn["text"]
    calls = turn["calls"] if turn.keys() == {"calls"} else [turn]
    if not isinstance(calls, list) or not calls:
        return None
    for call in calls:
        if not (isinstance(call, dict) and isinstance(call.get("name"), str) and call.keys() <= {"name", "arguments"}):
            return None
    return [Call(call["name"], call.get("arguments", {})) for call in calls]


def _read_call(text: str) -> list[Call] | None:
    """A call as Python writes it, with literal arguments."""
    text = text.strip()
    if len(text) > _LONGEST_CALL or not re.match(r"\w+\s*\(", text):
        return None
    try:
        node = ast.parse(text, mode="eval").body
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            return None
        positional = tuple(ast.literal_eval(value) for value in node.args)
        arguments = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in node.keywords}
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return [Call(node.func.id, arguments, positional)]


def _arguments(tool: Tool, call: Call) -> dict[str, Any]:
    arguments = call.arguments
    if call.positional:
        if len(call.positional) > len(tool.parameters):
            raise ToolError(f"{tool.name} takes {len(tool.parameters)} arguments, got {len(call.positional)}")
        by_position = dict(zip(tool.parameters, call.positional, strict=False))
        if twice := by_position.keys() & arguments.keys():
            raise ToolError(f"{tool.name} got {min(twice)} twice")
        arguments = {**by_position, **arguments}
    return tool.validate(arguments)


def no_tool(name: str, tools: Iterable[str]) -> ToolResult:
    """The result of a call of something else than ``tools``."""
    return ToolResult(f"Error: there is no tool {name[:80]!r}; tools are {', '.join(tools)}", is_error=True)


def _guarded(run: Callable[[], Any]) -> ToolResult:
    try:
        value = run()
    except ToolError as error:
        return ToolResult(f"Error: {error}", is_error=True)
    if value is None:
        return ToolResult(DONE)
    return ToolResult(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _counts(results: Sequence[ToolResult]) -> dict[str, int]:
    return {"tool_calls": len(results), "tool_errors": sum(result.is_error for result in results)}


@cache
def _tools(cls: type) -> dict[str, Tool]:
    """The tools of a class by name; those of its bases come first."""
    names = dict.fromkeys(name for base in reversed(cls.__mro__) for name in vars(base))
    marked = {name: method for name in names if getattr(method := getattr(cls, name), _MARK, False)}
    return {name: _tool(name, method) for name, method in marked.items()}


def _tool(name: str, method: Callable[..., Any]) -> Tool:
    """Raises TypeError for a method without a docstring, and for a parameter that a schema cannot show."""
    from pydantic import ConfigDict, Field, ValidationError, create_model

    description, about = _described(method)
    if not description:
        raise TypeError(f"tool {name}: expected a docstring, which tells the model what the tool does")
    hints, fields, names = get_type_hints(method, include_extras=True), {}, {}
    for number, parameter in enumerate(list(inspect.signature(method).parameters.values())[1:]):
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if not by_name or parameter.name not in hints:
            raise TypeError(f"tool {name}: expected the parameter {parameter.name} to have a type and no star")
        default = ... if parameter.default is parameter.empty else parameter.default
        # By number, since a model has attributes of its own (copy, json, schema, ...).
        names[f"argument_{number}"] = parameter.name
        info = Field(default, alias=parameter.name, description=about.get(parameter.name))
        fields[f"argument_{number}"] = (hints[parameter.name], info)
    make: Any = create_model  # its overloads know no fields by a dictionary
    model = make(name, __config__=ConfigDict(extra="forbid", allow_inf_nan=False), **fields)

    def validate(arguments: Any) -> dict[str, Any]:
        try:
            checked = model.model_validate(arguments)
        except ValidationError as error:
            wrong = [(".".join(map(str, fault["loc"])), fault["msg"]) for fault in error.errors(include_url=False)]
            raise ToolError(f"{name}: " + "; ".join(": ".join(filter(None, pair)) for pair in wrong)) from None
        return {names[field]: getattr(checked, field) for field in checked.model_fields_set}

    function = {"name": name, "description": description, "parameters": _without_titles(model.model_json_schema())}
    return Tool(name, tuple(names.values()), {"type": "function", "function": function}, validate)


def _described(method: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description of a tool and those of its parameters, from the docstring."""
    text, _, rest = (inspect.getdoc(method) or "").partition("\nArgs:\n")
    section = textwrap.dedent(re.split(r"\n(?=\S)", rest)[0])
    about = re.findall(r"^(\w+): (.*(?:\n +.*)*)", section, re.MULTILINE)
    return text.strip(), {name: " ".join(words.split()) for name, words in about}


def _without_titles(schema: Any) -> Any:
    """Without the titles that repeat the names; a parameter that is called title stays."""
    if isinstance(schema, list):
        return [_without_titles(value) for value in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_titles(value) for name, value in schema.items() if name != "title" or isinstance(value, dict)
    }


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
    names = tool_names(tools)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise TypeError(f"{TOOLS} has several tools of the name {twice[0]!r}")
    return tools


def tool_names(schemas: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names of the tools with these schemas, in order."""
    return [tool["function"]["name"] for tool in schemas]


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


def calls_text(calls: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
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
