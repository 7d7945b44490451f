"""Published agents as their recipes run them, in bubblewrap on a Harbor task; the model's part is a script."""

from __future__ import annotations

import pytest
from known_agents import MEDIAN, SIDE_CALLS, end, play, shell
from record_agents import script

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
