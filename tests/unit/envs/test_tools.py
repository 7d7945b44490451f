"""Environments whose methods are tools."""

import json
from random import Random
from typing import Any, Literal

import numpy as np
import pytest

from verl_turnkey.envs import StepResult, ToolEnv, ToolError, tool
from verl_turnkey.envs.answers import Answer, Fault, read_reset, read_step
from verl_turnkey.envs.tools import (
    DONE,
    NOT_UNDERSTOOD,
    OVER,
    call_text,
    calls_text,
    random_call,
    read_tools,
    read_turn,
    words_text,
)


class Depot(ToolEnv):
    """Two parcels; the episode ends when the depot closes."""

    def begin(self, seed: int) -> tuple[StepResult, str]:
        self.at = {"P1": "Rome", "P2": "Lyon"}
        self.turns = 0
        return self.result("Hello."), "Send parcels."

    def result(self, observation: str) -> StepResult:
        self.turns += 1
        return StepResult(observation, str(self.at), reward=1.0, terminated=self.ended, extra={"parcels": len(self.at)})

    @tool
    def track(self, parcel: str, json: bool = False) -> dict:
        """Tell where a parcel is.

        Args:
            parcel: its number,
                such as P1
            json: in whichever form

        Raises an error for a parcel that is not known.
        """
        if parcel not in self.at:
            raise ToolError(f"there is no parcel {parcel}")
        return {"at": self.at[parcel], "json": json}

    @tool
    def send(self, parcel: str, to: Literal["Rome", "Oslo"], copies: int = 1, title: list[str] | None = None) -> None:
        """Send a parcel."""
        self.at[parcel] = to

    @tool
    def bill(self, amount: float) -> str:
        """Write a bill."""
        return f"{amount:.2f}"

    @tool
    def crash(self) -> int:
        """Stumble over a bug."""
        return {}["nothing"]

    @tool
    def close_depot(self) -> None:
        """Close the depot."""
        self.ended = True


@pytest.fixture
def depot() -> Depot:
    env = Depot()
    env.reset(seed=0)
    return env


def calls(*named: tuple[str, dict]) -> str:
    return json.dumps({"calls": [{"name": name, "arguments": arguments} for name, arguments in named]})


def results(env: ToolEnv, action: str) -> list[tuple[str, bool]]:
    return [(result["content"], result["is_error"]) for result in env.step(action)[4]["results"]]


def test_a_reset_gives_the_schemas_in_the_order_of_the_methods():
    _, info = Depot().reset(seed=0)
    tools = {schema["function"]["name"]: schema for schema in info["tools"]}
    assert list(tools) == ["track", "send", "bill", "crash", "close_depot"]
    assert tools["track"] == {
        "type": "function",
        "function": {
            "name": "track",
            "description": "Tell where a parcel is.",
            "parameters": {
                "type": "object",
                "properties": {
                    "parcel": {"type": "string", "description": "its number, such as P1"},
                    "json": {"type": "boolean", "default": False, "description": "in whichever form"},
                },
                "required": ["parcel"],
                "additionalProperties": False,
            },
        },
    }
    send = tools["send"]["function"]["parameters"]
    assert send["properties"]["to"] == {"type": "string", "enum": ["Rome", "Oslo"]}
    assert send["properties"]["title"]["anyOf"] == [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]
    assert send["required"] == ["parcel", "to"]
    assert tools["close_depot"]["function"]["parameters"]["properties"] == {}


def test_the_schemas_are_the_callers_to_change():
    Depot.tools()[0]["function"]["name"] = "changed"
    assert Depot.tools()[0]["function"]["name"] == "track"


def test_calls_run_in_order_and_have_a_result_each(depot):
    turn = calls(
        ("send", {"parcel": "P1", "to": "Oslo"}),
        ("track", {"parcel": "P1", "json": True}),
        ("track", {"parcel": "P9"}),
        ("bill", {"amount": 2}),
    )
    observation, reward, _, _, info = depot.step(turn)
    assert info["results"] == [
        {"content": DONE, "is_error": False},
        {"content": '{"at": "Oslo", "json": true}', "is_error": False},
        {"content": "Error: there is no parcel P9", "is_error": True},
        {"content": "2.00", "is_error": False},
    ]
    assert observation.split("\n") == [result["content"] for result in info["results"]]
    assert (reward, info["invalid"]) == (1.0, False)
    assert info["extra"] == {"tool_calls": 4, "tool_errors": 1, "parcels": 2}
    assert depot.turns == 2  # one for the reset


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (("fly", {}), "Error: there is no tool 'fly'; tools are track, send, bill, crash, close_depot"),
        (("step", {"action": "x"}), "Error: there is no tool 'step'"),
        (("track", {}), "Error: track: parcel: Field required"),
        (("track", {"parcel": 7}), "Error: track: parcel: Input should be a valid string"),
        (("track", {"parcel": "P1", "at": 1}), "Error: track: at: Extra inputs are not permitted"),
        (("track", []), "Error: track: Input should be"),
        (("track", None), "Error: track: Input should be"),
        (("send", {"parcel": "P1", "to": "Bonn"}), "Error: send: to: Input should be 'Rome' or 'Oslo'"),
        (("bill", {"amount": float("nan")}), "Error: bill: amount: Input should be a finite number"),
    ],
)
def test_what_the_model_did_wrong_is_an_error_result_and_changes_nothing(depot, call, error):
    before = depot.step("nonsense")[4]["state_key"]
    *_, info = depot.step(calls(call))
    [result] = info["results"]
    assert result["is_error"]
    assert result["content"].startswith(error)
    assert info["invalid"]
    assert info["state_key"] == before


def test_arguments_are_converted_to_their_types(depot):
    assert results(depot, calls(("bill", {"amount": "3"}))) == [("3.00", False)]


def test_a_bug_is_an_error_of_the_environment(depot):
    with pytest.raises(KeyError):
        depot.step(calls(("crash", {})))


def test_a_tool_can_end_the_episode_before_the_other_calls_of_its_turn(depot):
    turn = calls(("close_depot", {}), ("send", {"parcel": "P1", "to": "Oslo"}))
    _, _, terminated, _, info = depot.step(turn)
    assert terminated
    assert [result["content"] for result in info["results"]] == [DONE, OVER]
    assert depot.at["P1"] == "Rome"
    depot.reset(seed=0)
    assert not depot.step(calls(("track", {"parcel": "P1"})))[2]


def test_a_turn_without_a_call_needs_somebody_who_answers(depot):
    observation, _, _, _, info = depot.step('{"text": "hello"}')
    assert (observation, info["invalid"], info["results"]) == ("Error: call one of the tools", True, [])

    class Talking(Depot):
        def reply(self, text: str) -> str:
            return text.upper()

    env = Talking()
    env.reset(seed=0)
    observation, _, _, _, info = env.step('{"text": "hello"}')
    assert (observation, info["invalid"], info["results"]) == ("HELLO", False, [])


@pytest.mark.parametrize(
    "action",
    [
        call_text("track", parcel="P1", json=True),
        "  track('P1', json=True)  ",
        'track("P1", True)',
        '{"name": "track", "arguments": {"parcel": "P1", "json": true}}',
        calls(("track", {"parcel": "P1", "json": True})),
    ],
)
def test_spellings_of_a_call(depot, action):
    assert results(depot, action) == [('{"at": "Rome", "json": true}', False)]


def test_positions_are_checked(depot):
    assert results(depot, 'track("P1", True, 3)') == [("Error: track takes 2 arguments, got 3", True)]
    assert results(depot, 'track("P1", parcel="P2")') == [("Error: track got parcel twice", True)]
    assert results(depot, 'track(**{"parcel": "P1"})')[0][1]


@pytest.mark.parametrize(
    "action",
    [
        *("", "track", "hello (you)", "track(P1)", "track(", "a.track()", "track()()", "track('a') or 1", "[" * 99_999),
        *("track(" + "(" * 9_999, "track('" + "x" * 30_000 + "')", "track(__import__('os'))", "null", "[]", "7"),
        *(
            '{"calls": []}',
            '{"calls": [7]}',
            '{"text": 7}',
            '{"name": 7}',
            '{"name": "track", "arguments": {}, "id": 1}',
        ),
    ],
)
def test_anything_else_is_invalid_and_changes_nothing(depot, action):
    turns = depot.turns
    observation, reward, terminated, truncated, info = depot.step(action)
    assert (observation, reward, terminated, truncated) == (NOT_UNDERSTOOD, 0.0, False, False)
    assert info["invalid"]
    assert info["results"] == []
    assert info["extra"]["tool_calls"] == 0
    assert depot.turns == turns


def test_call_text_is_read_back():
    arguments = {"words": 'a "quoted" \\ word\nof two lines ü', "n": -3, "flag": None, "many": [1, 2.5, "x"]}
    [call] = read_turn(call_text("say", **arguments))
    assert (call.name, call.arguments) == ("say", arguments)


def test_a_fence_around_a_turn_does_not_count():
    for text in ('{"name": "say", "arguments": {"n": 1}}', "say(n=1)"):
        (plain,), (fenced,) = read_turn(text), read_turn(f"\n```json \n{text}\n```\n")
        assert (plain.name, plain.arguments) == (fenced.name, fenced.arguments) == ("say", {"n": 1})
    assert read_turn("```json\nnot a call\n```") is None


def test_tools_of_a_base_class_are_tools_unless_they_are_replaced():
    class Closed(Depot):
        def crash(self) -> int:
            return 1

        @tool
        def ring(self) -> None:
            """Ring the bell."""

    assert [schema["function"]["name"] for schema in Closed.tools()] == ["track", "send", "bill", "close_depot", "ring"]


def test_a_tool_needs_a_docstring_and_types():
    class Silent(Depot):
        @tool
        def hush(self) -> None:
            pass

    class Untyped(Depot):
        @tool
        def guess(self, what) -> None:
            """Guess."""

    class Starred(Depot):
        @tool
        def guess(self, *what: str) -> None:
            """Guess."""

    class Toolless(ToolEnv):
        begin = Depot.begin
        result = Depot.result

    with pytest.raises(NotImplementedError, match=r"ToolEnv must have a method result\(self, observation\)"):
        ToolEnv().result("")
    with pytest.raises(TypeError, match="Toolless has no tool: mark the methods that the model may call with @tool"):
        Toolless().available()
    for kind, words in ((Silent, "a docstring"), (Untyped, "the parameter what"), (Starred, "the parameter what")):
        with pytest.raises(TypeError, match=words):
            kind().reset(seed=0)


def function(name: Any = "go", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def reset(tools: Any) -> Answer:
    answer = read_reset(("a room", {"tools": tools}))
    assert isinstance(answer, Answer)
    return answer


def stepped(results: Any) -> Answer:
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
    answer = stepped(({"content": "a\ud800b", "is_error": True}, {"content": ""}))
    assert answer.faults == []
    assert answer.info["results"] == [{"content": "a?b", "is_error": True}, {"content": "", "is_error": False}]
    assert [tool["function"]["name"] for tool in answer.info["tools"]] == ["go"]  # those of the agent from now on
    assert "results" not in stepped([]).info


@pytest.mark.parametrize("results", ["done", [{"is_error": True}], [{"content": 3}], [{"content": "", "is_error": 1}]])
def test_results_of_another_form_are_a_fault(results):
    (fault,) = stepped(results).faults
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
