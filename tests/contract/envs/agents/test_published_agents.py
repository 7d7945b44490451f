"""Published agents as their recipes run them, in bubblewrap on a Harbor task; the model's part is a script."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
import ray
import record_agents
from record_agents import MEDIAN, ROOT, SIDE_CALLS, SUM, end, play, script, shell

from verl_turnkey.plugins.gateway import rehearsal
from verl_turnkey.plugins.gateway.codec import Parsed
from verl_turnkey.plugins.gateway.messages import ToolCall

SOLUTION = (MEDIAN / "solution/solve.sh").read_text()
FIX = SOLUTION + "\n[ $(pwd) = /app ] && ! (exec 3<>/dev/tcp/127.0.0.1/22) 2>/dev/null && echo repaired"


@pytest.mark.parametrize(
    "name",
    ["mini_swe", "pi", *(pytest.param(name, marks=pytest.mark.long) for name in ("codex", "qwen_code", "opencode"))],
)
def test_it_repairs_a_task(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # which playing changes
    episode = play(name, [shell(name, FIX), end(name)])
    assert episode.failure is None, episode
    assert (episode.success, episode.rows, episode.refused) == (True, 1, 0), episode
    assert episode.extra["exit_code"] == 0
    trained = [turn for turn in episode.turns if turn.trained]
    assert [turn.reward for turn in trained] == [0.0, 1.0]
    assert trained[0].state != trained[1].state
    assert trained[1].new == 1, "the second request goes on where the first one ended"
    assert len(episode.turns) - len(trained) == len(SIDE_CALLS.get(name, ()))


def test_one_that_gives_up_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    episode = play("mini_swe", [end("mini_swe")])
    assert episode.success is False
    assert [turn.reward for turn in episode.turns] == [0.0]


def test_a_function_with_a_library_of_agents() -> None:
    """Without a sandbox: the libraries that it needs are its own, beside those of training."""
    call = ToolCall("add", {"a": 2, "b": 3}, "")
    episode = play("pydantic_ai", [Parsed("", (call,), "Simple."), Parsed("5")])
    assert (episode.failure, episode.success, episode.rows) == (None, True, 1), episode
    assert [turn.reward for turn in episode.turns] == [0.0, 1.0]


@pytest.mark.long
def test_one_that_writes_its_edits_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    episode = play("aider", script("aider"))
    assert (episode.failure, episode.success, episode.rows, episode.refused) == (None, True, 3, 0), episode
    assert [(turn.model, turn.trained) for turn in episode.turns] == [
        *[("policy", True)] * 3,
        ("commit-message", False),
    ]
    assert [turn.reward for turn in episode.turns if turn.trained] == [0.0, 0.0, 1.0]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "rows"), [("openai_agents", 1), ("openai_agents_chat", 1), ("langgraph", 1), ("smolagents", 3)]
)
def test_a_program_with_an_environment_of_its_own(name: str, rows: int) -> None:
    episode = play(name, script(name))
    assert (episode.failure, episode.success, episode.rows, episode.refused) == (None, True, rows, 0), episode
    assert [turn.reward for turn in episode.turns] == [0.0, 0.0, 1.0]


# --- their recorder, with an agent that needs no installation ---------------------------------------------------------


ADDER = f"{ROOT}/tests/contract/plugins/gateway/agents_of_users.py:adder"


def test_requests_and_replies_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    replies = [Parsed("I add.", (ToolCall("add", {"a": 2, "b": 3}, ""),), "Simple."), Parsed("5")]
    monkeypatch.setattr(rehearsal, "Gateway", rehearsal.Gateway)  # which recording replaces
    monkeypatch.setattr(record_agents, "script", lambda name: replies)
    play = partial(record_agents.played, SUM, run=ADDER, in_process=True)
    monkeypatch.setattr(record_agents, "play", lambda name, turns: play(turns))
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


# --- nothing of an agent outlives its worker --------------------------------------------------------------------------


SECONDS = 300  # an actor of Ray starts first


@ray.remote(num_cpus=0)
class Worker:
    async def play(self, word: str) -> None:
        from verl_turnkey.envs.agents import processes
        from verl_turnkey.envs.agents.base import AgentHandle
        from verl_turnkey.envs.agents.command import CommandRunner

        processes._END_SECONDS = 1.0
        handle = AgentHandle("http://127.0.0.1:1/none/v1", "none", "none")
        await CommandRunner(["sh", "-c", f"setsid sleep {word} & sleep {word}"], timeout=600).run({}, handle)


def sleeping(word: str) -> list[int]:
    """The processes of ``sleep word``."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        pids += [int(folder.name)] if command == f"sleep\0{word}\0".encode() else []
    return pids


def within(seconds: float, number: int, word: str) -> bool:
    end = time.monotonic() + seconds
    while len(sleeping(word)) != number and time.monotonic() < end:
        time.sleep(0.1)
    return len(sleeping(word)) == number


def test_an_agent_ends_with_its_worker(ray_queue) -> None:
    worker, word = Worker.remote(), f"86{os.getpid()}"
    worker.play.remote(word)
    assert within(SECONDS, 2, word)
    ray.kill(worker)
    assert within(SECONDS, 0, word)
