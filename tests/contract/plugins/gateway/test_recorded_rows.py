"""Recorded requests of published agents, sent again to a gateway with a real tokenizer: the rows that training gets.

``tests/contract/envs/agents/record_agents.py NAME`` records an agent again.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import httpx
import pytest
from gateway_parts import Played, run
from recorded_traffic import DATA, recorded

from verl_turnkey.plugins.gateway.turns import Limits

EPISODE = "episode0"
"""what the records have in the place of an episode's tag"""
# agent -> why its rows begin, parameter -> requests in which it is ignored
EXPECTED: dict[str, tuple[list[str], dict[str, int]]] = {
    "aider": (["first", "history", "history"], {"temperature": 4}),
    "codex": (["first"], {"tools/namespace": 3, "tools/web_search": 3}),
    "langgraph": (["first"], {"temperature": 3}),
    "mini_swe": (["first", "branch"], {}),
    "openai_agents": (["first"], {"strict": 3}),
    "openai_agents_chat": (["first"], {"strict": 3}),
    "opencode": (["first"], {}),
    "pi": (["first"], {}),
    "pydantic_ai": (["first"], {"strict": 3}),
    "qwen_code": (["first"], {}),
    "smolagents": (["first", "history", "history"], {"tool_choice": 3}),
}


def written(reply: dict[str, Any]) -> str:
    """A recorded reply as Qwen writes it."""
    thoughts = f"<think>\n{reply['reasoning'].strip()}\n</think>\n\n" if reply["reasoning"] else ""
    calls = [json.dumps({"name": name, "arguments": arguments}) for name, arguments, _ in reply["calls"]]
    return thoughts + reply["text"] + "".join(f"\n<tool_call>\n{call}\n</tool_call>" for call in calls)


def replay(lines: list[dict[str, Any]], **limits: Any) -> Played:
    """An episode with recorded requests and replies."""

    async def agent(url: str) -> None:
        async with httpx.AsyncClient() as client:
            for line in lines:
                answer = await client.post(url + line["path"], json=line["body"], timeout=60)
                assert answer.status_code == 200, answer.text

    turns = [written(line["reply"]) for line in lines]
    return run(agent, turns, limits=Limits(room=40_000, turn=2_000, **limits), tag=EPISODE)


def steps(played: Played) -> list[int]:
    """The steps of all rows."""
    return [step["step"] for row in played.rows for step in row.extra_fields["turnkey"]["steps"]]


SIDE_CALLS = {"opencode": [{"no_tools": True}]}
"""``leave_out`` of its recipe"""


@pytest.mark.parametrize(("name", "expected"), EXPECTED.items())
def test_rows_of_a_recorded_agent(name: str, expected: tuple[list[str], dict[str, int]]) -> None:
    """``run`` also checks that each prompt is the head of a row, and that each sampled id is under exactly one mask."""
    lines = recorded(name)
    played = replay(lines, leave_out=SIDE_CALLS.get(name, ()))
    overruled = Counter(key for turn in played.session.turns for key in turn.request.overruled)
    assert (played.breaks, dict(overruled)) == expected
    assert sorted(steps(played)) == [*range(sum(line["trained"] for line in lines))]


def test_a_commit_message_of_the_policys_own_name_is_left_out_by_a_rule() -> None:
    """aider without ``--weak-model`` asks the policy for it, and none of its requests has tools."""
    lines = recorded("aider")
    lines = [{**line, "body": line["body"] | {"model": "policy"}} for line in lines]
    assert sorted(steps(replay(lines))) == [0, 1, 2, 3]
    assert sorted(steps(replay(lines, leave_out=[{"system": "Git commit messages"}]))) == [0, 1, 2]


def test_every_recorded_agent_is_replayed() -> None:
    assert {path.stem for path in DATA.glob("*.jsonl")} == {*EXPECTED}
