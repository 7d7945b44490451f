"""The recorder of published agents, with an agent that needs no installation."""

from __future__ import annotations

import asyncio

import pytest
import record_agents
from known_agents import ROOT, SUM

from verl_turnkey.plugins.gateway import rehearsal
from verl_turnkey.plugins.gateway.codec import Parsed
from verl_turnkey.plugins.gateway.messages import ToolCall
from verl_turnkey.plugins.gateway.rehearsal import Script

ADDER = f"{ROOT}/tests/contract/plugins/gateway/agents_of_users.py:adder"


def test_requests_and_replies_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [Parsed("I add.", (ToolCall("add", {"a": 2, "b": 3}, ""),), "Simple."), Parsed("5")]
    settings = {"agent": {"run": ADDER, "in_process": True}}
    monkeypatch.setattr(rehearsal, "Gateway", rehearsal.Gateway)  # which recording replaces
    monkeypatch.setattr(record_agents, "script", lambda name: replies)
    monkeypatch.setattr(
        record_agents, "play", lambda name, turns: asyncio.run(rehearsal.rehearse(settings, SUM, Script(turns)))
    )
    first, second = record_agents.record("adder")
    assert first["body"]["messages"] == [{"role": "user", "content": "2 + 3?"}]
    assert (first["repeated"], second["repeated"]) == ([], ["model", "temperature", "tools"])
    assert first["reply"] == {
        "id": "episode0_0",
        "text": "I add.",
        "calls": [["add", {"a": 2, "b": 3}, "call_episode0_0_0"]],
        "reasoning": "Simple.",
    }
    call = second["body"]["messages"][1]["tool_calls"][0]
    assert (call["id"], second["body"]["messages"][2]["content"]) == ("call_episode0_0_0", "5")
    assert [(line["after"], line["new"], line["broke"], line["trained"]) for line in (first, second)] == [
        (None, 1, None, True),
        (0, 1, None, True),
    ]
    assert first["ignored"] == second["ignored"] == ["temperature"]


def test_what_differs_between_machines_is_replaced_and_long_texts_are_cut() -> None:
    text = "at http://127.0.0.1:4567 on 2026-11-28"
    assert record_agents.short({"content": [text]}) == {"content": ["at http://GATEWAY on DATE"]}
    long, other = "a" * 150, "a" * 149 + "b"
    assert record_agents.short(long).startswith("a" * 100 + "... 150 characters ")
    assert record_agents.short(long) == record_agents.short("a" * 150) != record_agents.short(other)
    assert record_agents.short({"arguments": long}) == {"arguments": long}
