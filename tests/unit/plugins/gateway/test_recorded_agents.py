"""Recorded requests of published agents, parsed and matched anew.

``tests/contract/envs/agents/record_agents.py NAME`` records an agent again.
"""

import json
from typing import Any

import pytest
from recorded_traffic import DATA, recorded

from verl_turnkey.plugins.gateway.dialects import DIALECTS
from verl_turnkey.plugins.gateway.messages import Reply, Request, ToolCall
from verl_turnkey.plugins.gateway.tree import Match, Node, Tree

# agent -> turns, side calls among them, why trained turns do not extend the one before
EXPECTED = {
    "aider": (4, 1, ["history", "history"]),  # it shows files before the conversation and repeats its rules at the end
    "codex": (3, 0, []),
    "langgraph": (3, 0, []),
    "mini_swe": (4, 0, ["branch"]),  # it drops a turn without a call
    "openai_agents": (3, 0, []),
    "openai_agents_chat": (3, 0, []),
    "opencode": (4, 1, ["history"]),  # its first turn is another conversation than the title before it
    "pi": (3, 0, []),
    "pydantic_ai": (3, 0, []),
    "qwen_code": (3, 0, []),
    "smolagents": (3, 0, ["history", "history"]),  # it writes each turn anew, as text
}


def reply(line: dict[str, Any]) -> Reply:
    turn = line["reply"]
    return Reply(turn["id"], turn["text"], tuple(ToolCall(*call) for call in turn["calls"]), turn["reasoning"])


def replay(name: str) -> list[tuple[dict[str, Any], Request, Match, Node]]:
    """Each request, what it is parsed to, where it goes on and the turn that it becomes."""
    tree, played = Tree(), []
    for line in recorded(name):
        (dialect,) = (dialect for dialect in DIALECTS if dialect.path == line["path"])
        request = tree.whole(dialect.parse(line["body"], unsupported="refuse"))
        match = tree.match(request)
        played.append((line, request, match, tree.commit(request, reply(line), match.parent)))
    return played


@pytest.mark.parametrize("name", EXPECTED)
def test_its_requests_are_matched_as_when_they_were_recorded(name: str) -> None:
    played = replay(name)
    nodes = [node for *_, node in played]
    for line, request, match, _ in played:
        after = None if match.parent is None else nodes.index(match.parent)
        assert (after, len(match.new), match.reason) == (line["after"], line["new"], line["broke"])
        assert sorted(request.overruled) == line["ignored"]


@pytest.mark.parametrize(("name", "expected"), EXPECTED.items())
def test_turns_side_calls_and_breaks_are_those_that_are_known(name: str, expected: tuple[int, int, list[str]]) -> None:
    played = replay(name)
    side_calls = sum(not line["trained"] for line, _, _, _ in played)
    breaks = [match.reason for line, _, match, _ in played if match.reason and line["trained"]]
    assert (len(played), side_calls, breaks) == expected


@pytest.mark.parametrize("name", ["langgraph", "openai_agents_chat"])
def test_turns_go_on_although_the_client_drops_reasoning(name: str) -> None:
    first, second, third = replay(name)
    assert reply(first[0]).reasoning
    assert [message.reasoning for message in second[1].messages if message.role == "assistant"] == [None]
    assert [match.parent for _, _, match, _ in (second, third)] == [first[3], second[3]]


def test_each_recorded_agent_is_known_and_holds_nothing_of_a_machine() -> None:
    assert {path.stem for path in DATA.glob("*.jsonl")} == {*EXPECTED}
    for path in DATA.glob("*.jsonl"):
        text = path.read_text(encoding="utf-8")
        assert path.stat().st_size < 60_000
        for word in ("authorization", "site-packages", "/tmp/turnkey", "/root/", "bearer", "api_key"):
            assert word not in text.lower(), (path.name, word)


def test_a_history_that_is_edited_breaks_the_replay() -> None:
    """The matches are found in what was sent, not taken from the record."""
    first, second, *_ = recorded("pydantic_ai")
    tree = Tree()
    (chat,) = (dialect for dialect in DIALECTS if dialect.path == first["path"])
    tree.commit(chat.parse(first["body"], unsupported="refuse"), reply(first), None)
    body = json.loads(json.dumps(second["body"]))
    body["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"a": 3, "b": 3}'
    match = tree.match(chat.parse(body, unsupported="refuse"))
    assert (match.parent, match.reason) == (None, "edited")
