"""ProRAG on scores of a process reward model behind HTTP, under two modifiers of credit, with requests that fail."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
from launch import POLICY, Run, minigrid, train
from loopback import Refusal, serve

pytestmark = pytest.mark.long

TURNS, STEPS = 8, 2
LEVEL = {"level": "MiniGrid-Empty-Random-5x5-v0", "max_steps": TURNS}
EVERY = 5  # how often the scorer refuses
A_GRAE, EMPG = {"alpha": 0.5}, {"k": 0.1, "zeta": 0}


def score(action: str | None) -> float:
    """What the reward model thinks of an action."""
    return 0.75 if action == "go forward" else 0.25


class Models:
    """A reward model as vLLM serves it, which refuses every fifth episode, and a chat model that judges each step."""

    def __init__(self) -> None:
        self.requests = self.refused = 0

    def classify(self, question: dict[str, Any]) -> dict[str, Any]:
        assert question["model"] == "prm"
        self.requests += 1
        if self.requests % EVERY == 0:
            self.refused += 1
            raise Refusal(400, "this episode is too long for me")
        scores = [score(text) for text in question["input"]]
        return {"data": [{"index": i, "probs": [1 - value, value]} for i, value in enumerate(scores)]}

    def chat(self, question: dict[str, Any]) -> dict[str, Any]:
        action = question["messages"][-1]["content"]
        text = f"It is what it is.\nScore: {10 * score(action)}"
        return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}


@pytest.fixture(scope="module")
def models() -> Models:
    return Models()


@pytest.fixture(scope="module")
def run(model: Path, models: Models, out: Path) -> Iterator[Run]:
    """The reward is the share of steps ahead, so that outcomes are from 0 to 1 and hardly any group is constant."""
    routes = {"/classify": models.classify, "/v1/chat/completions": models.chat}
    with serve(routes) as (url, _):
        scorer = f'name: scorer, url: "{url}/classify", model: prm, text: "{{action}}", column: turn_score'
        judge = f'name: judge, per: step, url: "{url}/v1", model: m, prompt: "{{action}}", column: opinion'
        rewards = [
            f"name: '{POLICY}:forward', weight: {1 / TURNS}",
            scorer,
            judge,
            f"name: '{POLICY}:doubt', column: entropy",
        ]
        yield train(
            out,
            model,
            "+turnkey=dual_granularity",
            *minigrid(out, LEVEL, seed=1),
            "turnkey.rollout.invalid_action_penalty=0",
            f"turnkey.rewards=[{', '.join(f'{{{entry}}}' for entry in rewards)}]",
            f"turnkey.credit.modify=[{{name: a_grae, {_options(A_GRAE)}}}, {{name: empg, {_options(EMPG)}}}]",
            steps=STEPS,
            rollouts=8,
            mini_batch=4,
            lr=1e-4,
            env={"no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1"},
        )


def _options(params: dict[str, float]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in params.items())


def scored(run: Run, step: int) -> list[dict[str, Any]]:
    """The steps trained on in ``step``, with their columns, the number of their tokens and their credit."""
    seen = run.seen(step)
    rows = dict(zip(seen["keys"], zip(seen["mask"], seen["advantages"], strict=True), strict=True))
    records = []
    for record in run.steps():
        if record["row"] in rows:
            mask, advantage = rows[record["row"]]
            credit = advantage[mask.bool()].double().unique()
            assert len(credit) == 1, "a turn has one credit on all its tokens"
            records.append(record | record["extra"] | {"tokens": int(mask.sum()), "credit": float(credit[0])})
    return records


def test_the_scores_reach_the_record_of_each_step(run: Run) -> None:
    played = [episode for episode in run.episodes("train") if episode["failed"] is None]
    assert len(played) > 16
    for episode in played:
        steps = episode["steps"]
        for column in ("turn_score", "opinion"):
            assert [json.loads(step["extra"])[column] for step in steps] == [score(step["action"]) for step in steps]
        ahead = sum(step["action"] == "go forward" for step in steps)
        assert sum(step["composed_reward"] for step in steps) == pytest.approx(ahead / TURNS), "they are no reward"


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_is_that_of_the_naive_twins_of_method_and_modifiers(run: Run, step: int) -> None:
    steps = scored(run, step)
    base = naive.dual_granularity(steps)
    expected = naive.empg(steps, naive.a_grae(steps, base=base, **A_GRAE), **EMPG)
    np.testing.assert_allclose([record["credit"] for record in steps], expected, atol=1e-5)
    assert len({round(value, 3) for value in expected}) > 10
    metrics = run.metrics[step]
    outcome: dict[str, float] = defaultdict(float)
    for record in steps:
        outcome[record["trajectory"]] += record["reward"]
    mean = np.mean(list(outcome.values()))
    assert metrics["credit/a_grae/mean_outcome"] == pytest.approx(mean)
    assert metrics["credit/a_grae/damping"] == pytest.approx(min(1, mean / A_GRAE["alpha"]))
    assert 1 < metrics["credit/empg/gain/max"] < 1.2
    assert metrics["credit/empg/bonus/mean"] == 0


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_turns_with_better_scores_get_more_credit(run: Run, step: int) -> None:
    """In the same episode, where the outcome is the same; the modifiers are set so that they do not turn it round."""
    compared = 0
    episodes: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for record in scored(run, step):
        episodes[record["trajectory"]][record["turn_score"]].append(record["credit"])
    for credit in episodes.values():
        if len(credit) == 2:
            assert min(credit[0.75]) > max(credit[0.25])
            compared += 1
    assert compared > 4


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_components_that_give_columns_are_logged(run: Run, step: int) -> None:
    steps = scored(run, step)
    episodes = len({record["trajectory"] for record in steps})
    for label, column in (("scorer", "turn_score"), ("judge", "opinion"), ("doubt", "entropy")):
        mean = sum(record[column] for record in steps) / episodes
        assert run.metrics[step][f"episode/composed_return.{label}/mean"] == pytest.approx(mean)
    assert np.isfinite(run.metrics[step]["actor/grad_norm"])
    assert run.metrics[step]["actor/grad_norm"] > 0


def test_a_scorer_that_fails_costs_its_episode_alone(run: Run, models: Models) -> None:
    """A request that is refused is not repeated; rollouts that wait for the same one share its end."""
    episodes = run.episodes("train")
    failed = [episode for episode in episodes if episode["failed"]]
    assert models.refused > 0
    assert models.refused <= len(failed) < len(episodes) / 2
    for episode in failed:
        assert "JudgeError: turnkey.rewards[1] (scorer): the scorer at http://127.0.0.1:" in episode["failed"]
        assert "(status 400): 'this episode is too long for me'" in episode["failed"]
    for step in range(1, STEPS + 1):
        here = [episode for episode in episodes if episode["global_step"] == step]
        lost = {episode["episode"] for episode in here if episode["failed"]}
        assert len(here) == 32
        assert run.metrics[step]["episode/failed"] == len(lost)
        trained = {record["trajectory"] for record in scored(run, step)}
        assert trained == {episode["episode"] for episode in here} - lost
