"""Agents of several conversations or roles, on real verl: credit along each, whatever runs at the same time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import naive
import pytest
from launch import Run, agent_tasks, data, gigpo_by_role, train
from thinking_agents import BEFORE

AGENT = Path(__file__).with_name("thinking_agents.py")
PAIR = Path(__file__).parents[2] / "examples" / "agents" / "planner_and_executor.py"
STEPS = 2
LIMITS = ("data.max_prompt_length=256", "data.max_response_length=600", f"trainer.test_freq={STEPS}")
FIRST = {"draft": "best_of_three", "plan": "planner", "root": "search", "turn 1": "summarising"}
"""state of an agent's first turn -> the agent"""
TURNS = {"best_of_three": 5, "planner": 8, "search": 7, "summarising": 5}


@contextmanager
def judge() -> Iterator[str]:
    """The base URL of a model that grades any text, equal texts equally."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            message = {"role": "assistant", "content": str(sum(body["messages"][-1]["content"].encode()) % 97)}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            reply = {"id": "c", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]}
            content = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def run(model: Path, out: Path) -> Run:
    tasks = [{"kind": kind, "question": f"Which door, {kind}?"} for kind in BEFORE]
    agent_tasks(out, "thoughts", train=tasks, val=tasks)
    with judge() as url:
        return train(
            out,
            model,
            "+turnkey=gigpo",
            f"turnkey.agent.run={AGENT}:play",
            f'turnkey.agent.models={{judge: {{url: "{url}"}}}}',
            "turnkey.rollout.max_tokens_per_turn=8",
            "turnkey.rollout.max_turns=16",
            *data(out, batch=len(tasks)),
            *LIMITS,
            steps=STEPS,
        )


def on(run: Run, step: int) -> list[dict[str, Any]]:
    return [episode for episode in run.episodes("train") if episode["global_step"] == step]


def number(turn: dict[str, Any]) -> int:
    """The number that the agent gave a reply, decoded from its reward."""
    return round(turn["reward"] % 1 * 64) % 12


def gigpo(steps: list[dict[str, Any]]) -> list[float]:
    """A plain GiGPO on the conversations as the agents know them."""
    rows = []
    for step in steps:
        own = [other for other in steps if other["trajectory"] == step["trajectory"]]
        kind = next(FIRST[other["anchor"]] for other in own if other["anchor"] in FIRST)
        before = BEFORE[kind].get(number(step))
        after = next((other["step"] for other in own if number(other) == before), -1)
        paid = {"own": step["reward"] % 1, "outcome": step["reward"] // 1}
        rows.append({**step, "after": after, "request": (step["anchor"], after), **paid})
    return naive.gigpo(rows)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_follows_the_conversations(run: Run, step: int) -> None:
    run.agrees_with(gigpo, step)
    for name in FIRST:
        values = {record["composed_reward"] for record in run.steps() if record["anchor"] == name}
        assert len(values) > 1 or name in ("plan", "turn 1"), "samples of one request are told apart"


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_every_reply_is_trained_as_sampled(run: Run, model: Path, step: int) -> None:
    episodes = on(run, step)
    assert [episode["failed"] for episode in episodes] == [None] * 16
    turns = Counter(len(episode["steps"]) for episode in episodes)
    assert turns == {number: 4 * times for number, times in Counter(TURNS.values()).items()}
    assert run.metrics[step]["agent/calls"] == sum(TURNS.values()) / 4
    assert run.metrics[step]["agent/left_out"] == 0
    assert run.metrics[step]["training/rollout_probs_diff_max"] < 1e-4


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_the_judge_is_asked_and_not_trained(run: Run, step: int) -> None:
    calls = [json.loads(episode["other_calls"] or "[]") for episode in on(run, step)]
    assert Counter(len(of_episode) for of_episode in calls) == {3: 4, 0: 12}
    assert {call["model"] for of_episode in calls for call in of_episode} == {"judge"}
    assert run.metrics[step]["agent/models/judge"] == 3 / 4


def test_it_validates(run: Run, pair: Run) -> None:
    assert "val-core/thoughts/acc/mean@1" in run.metrics[STEPS]
    assert "val-core/sums/acc/mean@1" in pair.metrics[STEPS]


# --- one model as a planner and an executor, with an outcome for each -------------------------------------------------
@pytest.fixture(scope="module")
def pair(model: Path, out: Path) -> Run:
    tasks = [{"numbers": [2, 3, n]} for n in range(4)]
    agent_tasks(out / "sums", "sums", train=tasks, val=tasks[:2])
    return train(
        out / "sums",
        model,
        "+turnkey=gigpo",
        f"turnkey.agent.run={PAIR}:play",
        "turnkey.rollout.max_tokens_per_turn=8",
        *data(out / "sums", batch=4),
        *LIMITS,
        steps=STEPS,
    )


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_is_that_of_each_role_alone(pair: Run, step: int) -> None:
    pair.agrees_with(gigpo_by_role, step)
    advantages = [row.abs().max().item() for (row,) in pair.rows(step, "advantages")]
    assert max(advantages) > 0


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_role_s_conversation_is_a_row_and_its_outcome_is_on_its_last_turn(pair: Run, step: int) -> None:
    assert pair.metrics[step]["rows/per_episode"] == 2
    assert pair.metrics[step]["training/rollout_probs_diff_max"] < 1e-4
    for episode in on(pair, step):
        assert episode["failed"] is None
        steps = episode["steps"]
        extras = [json.loads(s["extra"]) for s in steps]
        assert [extra["role"] for extra in extras] == ["planner", "executor"] * 2
        assert [s["reward"] for s in steps] == [0, 0, extras[2]["role_outcome"], extras[3]["role_outcome"]]
        assert len({s["row"] for s in steps}) == 2
