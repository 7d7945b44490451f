"""What the judge asks in a rollout is what ``turnkey prm data`` makes of the rollout's log."""

from __future__ import annotations

from pathlib import Path

import pytest
from judge_server import JudgeServer

from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.eval.prm import outcome_labels, read_episodes, scored

TALK = ["turnkey.rollout.prompt=conversation", "turnkey.rollout.max_tokens_per_turn=20", "data.max_response_length=600"]


@pytest.mark.parametrize("prompt", [[], TALK], ids=["template", "conversation"])
def test_the_judge_asks_what_the_model_was_trained_on(play, tmp_path: Path, prompt: list[str]):
    """The last turn but one has no effect: the agent sees the same observation again."""
    task = Task("contract/Awkward-v0", 3, {"says_more": True})
    with JudgeServer(lambda _: {"1": 0.7, "0": 0.3}) as server:
        rewards = f'turnkey.rewards=[{{name: judge, per: step, binary: true, url: "{server.url}", model: prm}}]'
        play(["look", "stumble", "win"], task, rewards, f"turnkey.log.trajectories={tmp_path}", *prompt)
    conversations = [question["messages"] for question in server.questions]
    episodes = read_episodes(tmp_path).episodes
    rows = [*scored(episodes, outcome_labels(episodes), "judge", 20_000)]
    expected = [[dict(message) for message in row["messages"][:-1]] for row in rows]
    assert len(rows) == len(conversations) == 3
    assert "this task:\ndo as you are told\n" in conversations[0][0]["content"]
    assert sorted(conversations, key=str) == sorted(expected, key=str)
