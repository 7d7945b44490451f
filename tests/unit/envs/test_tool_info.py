"""``info["tools"]`` and ``info["results"]``, and the actions of calls."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest

from verl_turnkey.envs.answers import Answer, Fault, read_reset, read_step
from verl_turnkey.envs.tool_info import calls_text, random_call, read_results, read_tools, words_text


def function(name: Any = "go", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def reset(tools: Any) -> Answer:
    answer = read_reset(("a room", {"tools": tools}))
    assert isinstance(answer, Answer)
    return answer


def step(results: Any) -> Answer:
    answer = read_step(("a room", 0.0, False, False, {"results": results, "tools": [function()]}))
    assert isinstance(answer, Answer)
    return answer


def test_tools_of_a_reset_are_kept_whole():
    parameters = {
        "type": "object",
        "properties": {"way": {"anyOf": [{"enum": ["north"]}, {"type": "null"}], "default": None}},
        "$defs": {"x": {"type": "integer", "minimum": 1}},
    }
    answer = reset((function("go", parameters=parameters), function("look", description="Look.")))
    assert answer.faults == []
    assert answer.info["tools"] == [
        function("go", parameters=parameters, description=""),
        function("look", description="Look.", parameters={"type": "object", "properties": {}}),
    ]


def test_tools_are_a_copy():
    own = [function("go", parameters={"type": "object", "properties": {"way": {"type": "string"}}})]
    taken = reset(own).info["tools"]
    taken[0]["function"]["parameters"]["properties"]["way"]["type"] = "integer"
    assert own == [function("go", parameters={"type": "object", "properties": {"way": {"type": "string"}}})]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("go", "info['tools'] must be a list of function schemas, not str"),
        ({"go": 1}, "info['tools'] must be a list of function schemas, not dict"),
        ([{"name": "go"}], "info['tools'][0] must be {'type': 'function', 'function': {...}}, not dict"),
        ([function(), {"type": "web_search"}], "info['tools'][1] must be"),
        ([function("")], "info['tools'][0] must have a name, not str ''"),
        ([function(3)], "must have a name, not int 3"),
        ([function(description=3)], "the description of info['tools'][0] must be text"),
        ([function(parameters=[])], "the parameters of info['tools'][0] must be a JSON schema of an object"),
        ([function(parameters={"properties": []})], "the parameters of info['tools'][0] must be a JSON schema"),
        ([function(), function()], "info['tools'] has several tools of the name 'go'"),
        ([function(default=float("nan"))], "info['tools'] must hold nothing but JSON"),
        ([function(default=np.float32(1))], "info['tools'] must hold nothing but JSON"),
    ],
)
def test_tools_of_another_form_are_a_fault(tools, message):
    answer = reset(tools)
    (fault,) = answer.faults
    assert isinstance(fault, Fault)
    assert fault.property == "info"
    assert message in fault.message
    assert "tools" not in answer.info


@pytest.mark.parametrize("tools", [None, []])
def test_an_environment_without_tools_has_none(tools):
    assert "tools" not in reset(tools).info
    assert reset(tools).faults == []


def test_results_of_a_step():
    answer = step(({"content": "a\ud800b", "is_error": True}, {"content": ""}))
    assert answer.faults == []
    assert answer.info["results"] == [{"content": "a?b", "is_error": True}, {"content": "", "is_error": False}]
    assert "tools" not in answer.info  # they are those of the reset
    assert "results" not in step([]).info


@pytest.mark.parametrize("results", ["done", [{"is_error": True}], [{"content": 3}], [{"content": "", "is_error": 1}]])
def test_results_of_another_form_are_a_fault(results):
    (fault,) = step(results).faults
    assert fault.message.startswith("info['results']")


def test_a_note_stands_behind_the_observation():
    assert Answer("a room", {}).text == "a room"
    assert Answer("a room", {"note": "Error: no"}).text == "a room\nError: no"
    assert Answer("a room", {"note": "Error: no"}).observation == "a room"


def test_equal_calls_are_equal_actions():
    assert calls_text([("go", {"b": 1, "a": [1, 2]})]) == '{"calls":[{"arguments":{"a":[1,2],"b":1},"name":"go"}]}'
    assert calls_text([("go", {"a": [1, 2], "b": 1})]) == calls_text([("go", {"b": 1, "a": [1, 2]})])
    assert words_text('"É" 日本') == '{"text":"\\"É\\" 日本"}'


def test_random_calls_are_of_the_schemas_types():
    kinds = {
        "way": {"enum": ["north", "south"]},
        "n": {"type": "integer"},
        "x": {"type": ["number", "null"]},
        "loud": {"type": "boolean"},
        "who": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "more": {"type": "array"},
        "any": True,
    }
    tools = read_tools([function("go", parameters={"type": "object", "properties": kinds})])
    for seed in range(20):
        (call,) = json.loads(random_call(tools, Random(seed)))["calls"]
        arguments = call["arguments"]
        assert call["name"] == "go"
        assert arguments["way"] in ("north", "south")
        assert type(arguments["n"]) is int
        assert arguments["x"] is None or isinstance(arguments["x"], float)
        assert type(arguments["loud"]) is bool
        assert arguments["who"] in ("a", None)
        assert arguments["more"] == []
    assert random_call(tools, Random(3)) == random_call(tools, Random(3))


def test_readers_raise_what_the_fault_says():
    with pytest.raises(TypeError, match=r"info\['tools'\] must be a list"):
        read_tools(3)
    with pytest.raises(TypeError, match=r"info\['results'\] must be a list"):
        read_results(3)
