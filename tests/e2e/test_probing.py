"""On MiniGrid the server tells how probable an answer is (IGPO), or the model answers (VSRM), before each turn.

With IGPO the outcomes are places in a group.
"""

from __future__ import annotations

import math
from pathlib import Path

import naive
import numpy as np
import pandas as pd
import pytest
import torch
from launch import POLICY, Run, minigrid, train
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.long

TURNS, STEPS, ROLLOUTS = 4, 2, 4
LEVEL = {"level": "MiniGrid-Empty-Random-5x5-v0", "max_steps": TURNS}
ANSWER, ANSWERS = "go forward", 4


def probe(out: Path, model: Path, *overrides: str, rollouts: int) -> Run:
    """Each task has the same right answer."""
    tasks = minigrid(out, LEVEL, seed=3)
    data = pd.read_parquet(out / "train.parquet")
    data["reward_model"] = [{**fields, "ground_truth": ANSWER} for fields in data["reward_model"]]
    data.to_parquet(out / "train.parquet")
    return train(out, model, *overrides, *tasks, steps=STEPS, rollouts=rollouts, mini_batch=4, lr=1e-4)


@pytest.fixture(scope="module")
def run(model: Path, out: Path) -> Run:
    return probe(
        out / "probing",
        model,
        "+turnkey=information_gain",
        'turnkey.rollout.strategy={name: probe_gold, text: ""}',
        f"turnkey.rewards=[{{name: arena, compare: '{POLICY}:ahead'}}]",
        rollouts=ROLLOUTS,
    )


@pytest.fixture(scope="module")
def answering(model: Path, out: Path) -> Run:
    return probe(
        out / "answering",
        model,
        "+turnkey=progress",
        "turnkey.credit.alpha=0",
        f'turnkey.rollout.strategy={{name: probe, text: "", answers: {ANSWERS}, tokens: 4, temperature: 1.0}}',
        f"turnkey.rewards=[{{name: '{POLICY}:forward'}}]",
        rollouts=1,
    )


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_is_what_a_turn_changes_of_the_share_of_right_answers(answering: Run, step: int) -> None:
    answering.agrees_with(lambda steps: naive.progress([record | record["extra"] for record in steps], alpha=0), step)
    extra = [record["extra"] for record in answering.steps() if record["global_step"] == step]
    assert {columns["value_rollouts"] for columns in extra} == {ANSWERS}
    assert {columns["turn_value"] * ANSWERS for columns in extra} <= set(range(ANSWERS + 1))
    metrics = answering.metrics[step]
    assert metrics["branching/forks"] == metrics["episode/length/mean"]
    assert metrics["branching/measured"] == ANSWERS * metrics["episode/length/mean"]
    assert 0 < metrics["branching/measured_tokens"] <= 4 * metrics["branching/measured"]
    assert metrics["branching/measured_steps"] == metrics["branching/failed"] == 0
    assert metrics["actor/grad_norm"] > 0


def test_some_answers_are_right(answering: Run) -> None:
    assert len({record["extra"]["turn_value"] for record in answering.steps()}) > 1


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_is_that_of_what_was_measured(run: Run, step: int) -> None:
    run.agrees_with(lambda steps: naive.information_gain([record | record["extra"] for record in steps]), step)
    extra = [record["extra"] for record in run.steps() if record["global_step"] == step]
    assert {columns["value_rollouts"] for columns in extra} == {1}
    assert all(0 < columns["gold_probability"] == columns["turn_value"] < 1 for columns in extra)
    metrics = run.metrics[step]
    assert metrics["branching/forks"] == metrics["branching/measured"] == metrics["episode/length/mean"]
    assert metrics["branching/measured_tokens"] == metrics["branching/measured"]
    assert metrics["branching/measured_steps"] == metrics["branching/failed"] == 0
    assert metrics["actor/grad_norm"] > 0


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_outcomes_are_places(run: Run, step: int) -> None:
    paid: dict[str, list[float]] = {}
    for episode in (e for e in run.episodes("train") if e["global_step"] == step):
        paid.setdefault(episode["group"], []).append(sum(turn["composed_reward"] for turn in episode["steps"]))
    assert len(paid) == 4
    for places in paid.values():
        np.testing.assert_allclose(sorted(places), np.arange(ROLLOUTS) / (ROLLOUTS - 1), atol=1e-9)
    assert run.metrics[step]["episode/composed_return.arena/mean"] == pytest.approx(0.5)
    assert run.metrics[step]["episode/composed_return.arena_calls/mean"] == 3.0


def test_probabilities_are_those_of_the_model(run: Run, model: Path) -> None:
    """Before the first update, by a forward pass of the same weights; the server computes in another order."""
    tokenizer, policy = AutoTokenizer.from_pretrained(model), AutoModelForCausalLM.from_pretrained(model).eval()
    answer, probabilities = tokenizer.encode(ANSWER, add_special_tokens=False), set()
    logged = {
        record["row"]: record["extra"]["gold_probability"] for record in run.steps() if record["global_step"] == 1
    }
    for episode in (e for e in run.episodes("train") if e["global_step"] == 1):
        first, text = episode["steps"][0], episode["texts"][0]
        prompt = tokenizer.encode(text["prompt_tail"], add_special_tokens=False)
        assert len(prompt) == first["prompt_tokens"]
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + answer])).logits[0].float().log_softmax(-1)
        scores = [logits[len(prompt) - 1 + i, token].item() for i, token in enumerate(answer)]
        expected = math.exp(sum(scores) / len(scores))
        assert logged[f"{episode['episode']}_{int(first['row'])}"] == pytest.approx(expected, rel=2e-2)
        probabilities.add(round(expected, 6))
    assert len(probabilities) > 1
