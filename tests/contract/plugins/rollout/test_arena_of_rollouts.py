"""Rollouts judged by a model behind an endpoint, step by step or against each other, through the real agent loop."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from judge_server import JudgeServer
from scripted import SHORT, TREE, table, way
from test_branching import Bush

from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.eval.prm import outcome_labels, read_episodes, scored
from verl_turnkey.plugins.rollout.trajectory_log import VALIDATION

#: Leaves of the tree, the worst first; the environment's own rewards are of the same order.
LEAVES = ["LL", "LR", "RL", "RR"]
TALK = ["turnkey.rollout.prompt=conversation", "turnkey.rollout.max_tokens_per_turn=20", "data.max_response_length=600"]


def prefer(question: dict[str, Any]) -> str:
    """Scores both transcripts by the leaf that they end in."""
    text = question["messages"][0]["content"]
    moves = re.findall(r"at <([LR])>\s*Agent 2: ([LR])", text)
    first, second = (LEAVES.index("".join(letters)) for letters in moves)
    return json.dumps({"first": first, "second": second})


def arena(server: JudgeServer, *more: str) -> str:
    entries = [*more, f"{{name: arena, url: '{server.url}', model: m, retries: 0}}"]
    return f"turnkey.rewards=[{','.join(entries)}]"


def ended(rows: list[Any]) -> str:
    return "".join(str(step["action"]) for row in rows for step in row.extra_fields["turnkey"]["steps"])


@pytest.mark.parametrize("more", [(), ("{name: step, weight: 10}",)])
def test_rollouts_are_paid_their_places(play, more):
    with JudgeServer(prefer) as server:
        groups, _ = play(Bush(), TREE, arena(server, *more), SHORT, sessions=4)
    paid = {ended(rows): table(rows).reward.tolist() for rows in groups}
    assert sorted(paid) == LEAVES
    for place, leaf in enumerate(LEAVES):
        own = [0.25 * (leaf[0] == "R"), [0.0, 1.0, 2.0, 5.0][place]] if more else [0.0, 0.0]
        assert paid[leaf] == pytest.approx([10 * own[0], 10 * own[1] + place / 3])
    infos = [rows[-1].extra_fields["reward_extra_info"] for rows in groups]
    # Three games seed and three are the bracket's, each in both orders; what was asked before is not sent again.
    assert sum(info["composed_return.arena_calls"] for info in infos) == 12
    assert server.calls == len({json.dumps(question) for question in server.questions}) < 12
    assert sorted(info["composed_return.arena"] for info in infos) == pytest.approx([0, 1 / 3, 2 / 3, 1])


def test_a_rollout_that_fails_takes_no_part(play):
    bush = Bush()
    with JudgeServer(prefer) as server:
        groups, _ = play(
            lambda prompt: "break" if (move := bush(prompt)) and way(prompt) == "L" and move == "L" else move,
            TREE, arena(server), SHORT, sessions=4,
        )  # fmt: skip
    failed = [rows for rows in groups if rows[0].extra_fields["turnkey"]["failed"]]
    assert len(failed) == 1
    assert failed[0][0].extra_fields["reward_extra_info"]["composed_return.arena_calls"] == 0
    paid = {ended(rows): table(rows).reward.tolist()[-1] for rows in groups if rows not in failed}
    assert paid == {"LR": 0.0, "RL": 0.5, "RR": 1.0}


def test_a_judge_that_fails_costs_the_group(play):
    with JudgeServer(lambda question: "I cannot say.") as server:
        groups, _ = play(Bush(), TREE, arena(server), SHORT, sessions=2)
    for rows in groups:
        (row,) = rows
        assert "turnkey.rewards[0] (arena): the judge" in row.extra_fields["turnkey"]["failed"]
        assert row.response_mask == [0]


def test_validation_compares_nobody(play):
    with JudgeServer(prefer) as server:
        groups, _ = play(Bush(), TREE, arena(server), SHORT, sessions=2, fields={VALIDATION: True})
        assert server.calls == 0
    assert [rows[-1].reward_score for rows in groups] == [0.0, 0.0]


@pytest.mark.parametrize("prompt", [[], TALK], ids=["template", "conversation"])
def test_the_judge_asks_what_the_model_was_trained_on(play, tmp_path: Path, prompt: list[str]):
    """What it asks in a rollout is what ``turnkey prm data`` makes of the log; the last turn but one has no effect."""
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
