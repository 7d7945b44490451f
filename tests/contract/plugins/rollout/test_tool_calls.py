"""Which calls of a turn may run: their arguments against the schemas of the tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tool_env import function

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.plugins.rollout.tool_calls import Tools, WrittenCall

POINT = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": False}
BOOK = function(
    "book",
    ("seats",),
    seats={"type": "integer", "minimum": 1},
    name={"anyOf": [{"type": "string"}, {"type": "null"}]},
    kinds={"type": "array", "items": {"enum": ["window", "aisle"]}},
    place={"$ref": "#/$defs/point"},
    loud={"type": "boolean"},
)
BOOK["function"]["parameters"]["$defs"] = {"point": POINT}
NOWHERE = function("lost", place={"$ref": "#/$defs/nowhere"})
TOOLS = Tools([BOOK, NOWHERE, function("look")])


def check(arguments: Any, name: str = "book") -> Any:
    return TOOLS.check(WrittenCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments), "id7"))


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ({"seats": 2}, {"seats": 2}),
        ({"seats": 2, "name": None, "kinds": ["aisle"], "place": {"x": 1.5}, "loud": False}, None),
        ({"seats": "2"}, {"seats": 2}),  # of parsers that read no types
        ({"seats": 2, "name": 7}, {"seats": 2, "name": "7"}),
        ({"seats": 2, "loud": "true"}, {"seats": 2, "loud": True}),
        ({"seats": 2, "kinds": '["window"]'}, {"seats": 2, "kinds": ["window"]}),
        ({"seats": 2, "place": '{"x": 1}'}, {"seats": 2, "place": {"x": 1}}),
        ({"seats": 2, "name": "2"}, {"seats": 2, "name": "2"}),  # which is a text already
        ({"seats": 2, "more": 1}, {"seats": 2, "more": 1}),  # the schema does not forbid it
    ],
)
def test_arguments_that_fit(arguments, taken):
    call = check(arguments)
    assert (call.name, call.arguments, call.error, call.id) == ("book", taken or arguments, None, "id7")
    assert type(call.arguments["seats"]) is int


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "the arguments of book do not fit: 'seats' is a required property"),
        ({"seats": 0}, "seats: 0 is less than the minimum of 1"),
        ({"seats": "two"}, "seats: 'two' is not of type 'integer'"),
        ({"seats": True}, "seats: True is not of type 'integer'"),
        ({"seats": 1.5}, "seats: 1.5 is not of type 'integer'"),
        ({"seats": 1, "kinds": ["roof"]}, "kinds.0: 'roof' is not one of ['window', 'aisle']"),
        ({"seats": 1, "place": {"y": 1}}, "place: Additional properties are not allowed ('y' was unexpected)"),
        ({"seats": 1, "place": {"x": "far"}}, "place.x: 'far' is not of type 'number'"),
        ({"seats": "a" * 1000}, "a..."),
    ],
)
def test_arguments_that_do_not(arguments, error):
    call = check(arguments)
    assert error in call.error
    assert call.kind == "admissible"
    assert call.arguments == arguments
    assert len(call.error) < 400


@pytest.mark.parametrize(
    "arguments", ["{", "[1]", "3", '"x"', '{"seats": NaN}', '{"seats": Infinity}', "[" * 100_000, '{"a":' * 100_000]
)
def test_arguments_that_are_no_json_object(arguments):
    call = check(arguments)
    assert call.error.startswith("the arguments of book ")
    assert call.kind == "format"


def test_a_call_without_arguments():
    assert check("", "look").error is None
    assert check("{}", "look").arguments == {}


def test_a_tool_that_does_not_exist():
    call = check({}, "fly" * 100)
    assert call.error == f"there is no tool {('fly' * 100)[:80]!r}; the tools are book, lost, look"
    assert call.kind == "admissible"


def test_a_reference_to_nowhere_is_an_error_of_the_call():
    assert "they cannot be checked" in check({"place": 1}, "lost").error


def test_an_unusable_schema_of_an_agents_tool_takes_any_arguments():
    tools = Tools([NOWHERE, function("go", way={"type": "north"})], strict=False)
    for name, arguments in (("lost", '{"place": 1.5}'), ("go", '{"way": "up"}')):
        call = tools.check(WrittenCall(name, arguments))
        assert (call.arguments, call.error) == (json.loads(arguments), None)
    assert "not JSON" in tools.check(WrittenCall("go", '{"way": 1e400}')).error


def test_parameters_that_are_no_schema():
    with pytest.raises(EnvironmentFailure, match="the parameters of the tool 'go' are not a JSON Schema"):
        Tools([function("go", way={"type": "north"})])
