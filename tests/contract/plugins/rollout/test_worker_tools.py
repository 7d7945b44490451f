"""verl's own tools beside those of the environment, and in environments without."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from test_tools import CONVERSATION, FORMAT, LENGTHS, LOOK, PUT, REAL, reason, written
from test_tools import shelf as shelf
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import load_function_tools_from_path
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

from verl_turnkey.envs.prompting.actions import Call
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.rollout.turn_answer import VerlTools

FILE = '''
import time

from verl.tools.function_tool import function_tool


@function_tool
def add(a: int, b: int = 1) -> str:
    """Add two numbers.

    Args:
        a: the one.
        b: the other.
    """
    if a < 0:
        raise ValueError("a negative number")
    if a > 100:
        time.sleep(5)
    return str(a + b)
'''


class Notes(BaseTool):
    """Says what it was made with; counts the instances that are open."""

    open = 0

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        Notes.open += 1
        return str(kwargs["create_kwargs"].get("owner")), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any):
        kwargs["agent_data"].extra_fields["noted"] = parameters["text"]
        return ToolResponse(text=f"{instance_id} noted {parameters['text']}"), 0.0, {}

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        Notes.open -= 1


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> list[Any]:
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(FILE)
    schema = {
        "type": "function",
        "function": {
            "name": "note",
            "description": "Note a text.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        },
    }
    return [*load_function_tools_from_path(str(path)), Notes({}, OpenAIFunctionToolSchema.model_validate(schema))]


ADD = ("add", {"a": 2, "b": 3})


def test_calls_of_both_kinds_in_one_turn(shelf, tools):
    turns = [written("Qwen3", ADD, PUT, ("note", {"text": "x"}), LOOK), written("Qwen3", ADD), "done"]
    steps, _, script = shelf("Qwen3", turns, tools_of_verl=tools)
    names = [[call["name"] for call in json.loads(step["action"])["calls"]] for step in steps[:2]]
    assert names == [["add", "put", "note", "look"], ["add"]]
    assert [(step["valid"], step["reward"], step["anchor"]) for step in steps] == [
        (True, 2.0, ""),
        (True, 0.0, "cup cup"),  # the environment was not called
        (True, 0.0, "cup cup"),
    ]
    results = [
        f"<tool_response>\n{text}\n</tool_response>" for text in ("5", "cup is there", "None noted x", "2 things")
    ]
    assert "\n".join(results) in script.text(1)
    assert results[0] in script.text(2)[len(script.text(1)) :]
    assert '"name": "add"' in script.text(0)
    assert Notes.open == 0


def test_prompts_of_a_template_show_what_they_gave(shelf, tools):
    _, _, script = shelf("Qwen3", [written("Qwen3", ADD, PUT), "done"], prompts=(), tools_of_verl=tools)
    assert "on the shelf: cup cup\nadd: 5" in script.text(1)


def test_an_environment_without_tools_gets_the_words(play, tools):
    turns = ["stumble", written("Qwen3", ADD), "win"]
    rows, script = play(
        turns,
        Task("contract/Awkward-v0", 3),
        FORMAT,
        *LENGTHS,
        *CONVERSATION,
        tokenizer=REAL["Qwen3"].tokenizer(),
        tools=tools,
    )
    steps = [step for row in rows for step in row.extra_fields["turnkey"]["steps"]]
    called = '{"calls":[{"arguments":{"a":2,"b":3},"name":"add"}]}'
    assert [(step["action"], step["valid"]) for step in steps] == [("stumble", False), (called, True), ("win", True)]
    assert [step["reward"] for step in steps] == [0.0, 0.0, 0.5]
    assert "<tool_response>\n5\n</tool_response>" in script.text(2)


def test_a_name_that_two_tools_have_fails_the_episode(shelf, tools):
    schema = json.loads(tools[1].tool_schema.model_dump_json(exclude_none=True))
    schema["function"]["name"] = "look"
    twice = Notes({}, OpenAIFunctionToolSchema.model_validate(schema))
    _, rows, _ = shelf("Qwen3", [], "turnkey.rollout.max_turns=1", tools_of_verl=[twice])
    assert "both the environment and verl's configuration have a tool 'look'" in reason(rows)


@pytest.mark.parametrize(
    ("arguments", "seconds", "content"),
    [
        ({"a": -1}, 20.0, "Error: add raised ValueError: a negative number"),
        ({"a": 1000}, 0.2, "Error: add took more than 0.2 seconds"),
    ],
)
def test_a_tool_that_fails_gives_an_error(tools, arguments, seconds, content):
    own = VerlTools(tools, None, seconds)
    assert asyncio.run(own.result(Call("add", arguments))) == {"content": content, "is_error": True}


def test_a_tool_is_made_with_what_the_data_row_gives(tools):
    own = VerlTools(tools, {"note": {"create_kwargs": {"owner": "Ann"}}}, 5.0)
    result = asyncio.run(own.result(Call("note", {"text": "x"})))
    assert result == {"content": "Ann noted x", "is_error": False}


# --- MCP servers ------------------------------------------------------------------------------------------------------

PAD = Path(__file__).parents[3] / "contract/envs/mcp_servers/notes_server.py"
NOTE, READ = ("note", {"text": "milk"}), ("read", {})
LOOKS = written("Qwen3", LOOK)
SECONDS = "turnkey.env.step_timeout=30"


def servers(folder: Path, **entry: Any) -> str:
    entry = entry or {"command": sys.executable, "args": [str(PAD)], "env": {"SEED": "${TURNKEY_SEED}"}}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"pad": entry}}))
    return f"turnkey.mcp.servers={folder}/mcp.json"


def test_calls_of_a_server_and_of_the_environment_in_one_turn(shelf, tmp_path):
    turns = [written("Qwen3", NOTE, PUT, ("note", {"times": 0}), READ), written("Qwen3", NOTE), LOOKS, "done"]
    steps, (row,), script = shelf("Qwen3", turns, servers(tmp_path), SECONDS)
    calls = [[call["name"] for call in json.loads(step["action"]).get("calls", ())] for step in steps]
    assert calls == [["note", "put", "read"], ["note"], ["look"], []]
    assert [(step["valid"], step["reward"]) for step in steps] == [(False, 2.0), (True, 0.0), (True, 0.0), (True, 0.0)]
    anchors = [step["anchor"] for step in steps]
    assert anchors[0] == ""  # the environment's own key, before the first call of the server
    assert len({*anchors}) == 3
    assert anchors[2] == anchors[3]  # a look changes neither
    assert [step["extra"]["next_anchor"] for step in steps[:-1]] == anchors[1:]
    answered = script.text(1)[len(script.text(0)) :]
    positions = [answered.find(text) for text in ("1 notes", "cup is there", "do not fit: ", ">\nmilk\n<")]
    assert sorted(positions) == positions
    assert positions[0] > 0
    assert '{"anyOf": [{"minimum": 1, "type": "integer"}, {"type": "null"}]' in script.text(0)
    sampled = [i for answer in script.answers for i in answer]
    assert [i for i, trained in zip(row.response_ids, row.response_mask, strict=True) if trained] == sampled


def test_an_environment_without_tools_gets_the_words_beside_a_server(play, tmp_path):
    turns = [written("Qwen3", ("variables", {})), "win"]
    rows, script = play(
        turns,
        Task("contract/Awkward-v0", 3),
        FORMAT,
        *LENGTHS,
        *CONVERSATION,
        servers(tmp_path),
        SECONDS,
        "turnkey.mcp.tools=[variables]",
        tokenizer=REAL["Qwen3"].tokenizer(),
    )
    steps = [step for row in rows for step in row.extra_fields["turnkey"]["steps"]]
    assert [(step["valid"], step["reward"]) for step in steps] == [(True, 0.0), (True, 0.5)]
    assert "seed 3\n</tool_response>" in script.text(1)
    assert '"name": "note"' not in script.text(0)


def test_a_server_that_dies_fails_its_episode(shelf, tmp_path):
    _, rows, _ = shelf("Qwen3", [written("Qwen3", ("die", {})), "done"], servers(tmp_path), SECONDS)
    assert "MCP server pad: it broke down in die" in reason(rows)
    assert "(out of paper)" in reason(rows)


def test_a_server_that_does_not_start_fails_its_episode(shelf, tmp_path):
    _, rows, _ = shelf("Qwen3", ["done"], servers(tmp_path, command="false"), SECONDS)
    assert "MCP server pad: it did not start" in reason(rows)


def test_a_shared_server_is_part_of_no_state(shelf, tmp_path):
    steps, _, _ = shelf(
        "Qwen3", [written("Qwen3", READ), "done"], servers(tmp_path), "turnkey.mcp.shared=[pad]", SECONDS
    )
    assert [step["anchor"] for step in steps] == ["", ""]
