"""Conversations with MiniGrid under Turn-PPO: rows of many turns, a critic, credit by turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
import torch
from launch import POLICY, Run, critic, minigrid, train
from naive.critics import turn_gae_returns
from transformers import AutoTokenizer

from verl_turnkey.losses import turn_ids

LEVEL = {"level": "MiniGrid-Empty-Random-5x5-v0", "max_steps": 10}
STEPS = 5
TURN, BUDGET = 4, 220


@pytest.fixture(scope="module")
def run(model: Path, out: Path) -> Run:
    """Conversations that are full before they are over go on with their last turns, in a new row."""
    return train(
        out,
        model,
        "+turnkey=turn_gae",
        *minigrid(out, LEVEL, seed=1),
        "turnkey.rollout.prompt=conversation",
        "turnkey.rollout.when_full=drop_oldest",
        f"turnkey.rollout.max_tokens_per_turn={TURN}",
        f"data.max_response_length={BUDGET}",
        f"turnkey.rewards=[{{name: step, weight: 5}}, {{name: '{POLICY}:forward', weight: 0.5}}]",
        *critic(model, lr=1e-3),
        f"turnkey.teacher.source={POLICY}:plan",
        "turnkey.teacher.max_tokens=64",
        steps=STEPS,
        mini_batch=4,
        lr=1e-4,
    )


def valued(run: Run, step: int) -> list[dict[str, Any]]:
    """The steps trained on in ``step``, with the critic's value before each turn, from the queue."""
    seen = run.seen(step)
    rows = dict(zip(seen["keys"], zip(seen["mask"], seen["values"], seen["returns"], strict=True), strict=True))
    turns = []
    for record in run.steps():
        if record["row"] in rows:
            mask, values, returns = rows[record["row"]]
            tokens = torch.nonzero(turn_ids(mask[None])[0] == record["turn"])[:, 0]
            assert 0 < len(tokens) <= TURN
            turns.append(record | {"value": float(values[tokens[0]]), "tokens": len(tokens), "target": returns[tokens]})
    return turns


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_rows_hold_the_turns_as_they_were_written(run: Run, model: Path, step: int) -> None:
    run.holds_each_turn_once(step, AutoTokenizer.from_pretrained(model))
    # The log-probabilities of late turns as well: a row's context is what the server saw.
    assert run.metrics[step]["training/rollout_probs_diff_max"] < 1e-4
    assert run.metrics[step]["rows/per_episode"] < run.metrics[step]["episode/length/mean"]


def test_full_conversations_go_on_in_another_row(run: Run) -> None:
    episodes = run.episodes("train")
    assert all(e["failed"] is None for e in episodes)
    rows = [len({step["row"] for step in e["steps"]}) for e in episodes]
    assert any(number == 1 and len(e["steps"]) > 2 for number, e in zip(rows, episodes, strict=True))
    assert max(rows) > 1
    assert sum(rows) < sum(len(e["steps"]) for e in episodes) / 2
    assert max(len(response) for step in range(1, STEPS + 1) for response in run.seen(step)["responses"]) <= BUDGET
    assert max(run.metrics[step].get("rows/break/full", 0) for step in range(1, STEPS + 1)) > 0


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_and_targets_of_turns_are_those_of_the_naive_twin(run: Run, step: int) -> None:
    steps = valued(run, step)
    advantages = dict(zip([(e["row"], e["turn"]) for e in steps], naive.turn_gae(steps), strict=True))
    run.agrees_with(lambda records: [advantages[e["row"], e["turn"]] for e in records], step)
    for record, target in zip(steps, turn_gae_returns(steps), strict=True):
        np.testing.assert_allclose(record["target"].numpy(), target, atol=1e-4)
    assert len({round(value, 4) for value in advantages.values()}) > 10


def test_the_critic_learns_from_the_targets(run: Run) -> None:
    """They are far above what it begins with, so its values rise towards them."""
    steps = [valued(run, step) for step in range(1, STEPS + 1)]
    values = [np.mean([record["value"] for record in batch]) for batch in steps]
    targets = [np.mean([record["target"].mean() for record in batch]) for batch in steps]
    assert np.mean(targets) > values[0] + 0.3, "the test needs what there is to learn"
    assert values[-1] > values[0] + 0.2, values
    assert all(run.metrics[step]["critic/vf_loss"] > 0 for step in range(1, STEPS + 1))
    assert all(run.metrics[step]["actor/grad_norm"] > 0 for step in range(1, STEPS + 1))


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_teacher_rates_the_rows_that_have_a_text(run: Run, step: int) -> None:
    metrics = run.metrics[step]
    rows = metrics["teacher/rows_with_text"], metrics["teacher/rows_without_text"]
    assert min(rows) > 0
    assert sum(rows) == sum(bool(mask.any()) for mask in run.seen(step)["mask"])
    assert metrics["teacher/text_errors"] == metrics["teacher/no_place"] == metrics["teacher/cut_texts"] == 0
    assert metrics["teacher/gap_abs/mean"] > 1e-3
    assert metrics.get("teacher/gap_abs/control", 0.0) < 1e-4
    assert np.isfinite(metrics["teacher/contrast"])


# --- the model's own summaries ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["merged", "steps"])
def summarizing(request: pytest.FixtureRequest, model: Path, out: Path) -> Run:
    """Full conversations go on with a summary that the model writes."""
    folder = out.with_name(f"{out.name}-{request.param}")
    levels = minigrid(folder, LEVEL, seed=2)
    (folder / "template.txt").write_text("Task: {task}\n{summary}\n{observation}\n")
    return train(
        folder,
        model,
        "+turnkey=gigpo",
        *levels,
        f"turnkey.rollout.template={folder}/template.txt",
        "turnkey.rollout.prompt=conversation",
        "turnkey.rollout.when_full=summarize",
        "turnkey.rollout.summary_request=Sum up.",
        f"turnkey.rollout.layout={request.param}",
        f"turnkey.rollout.max_tokens_per_turn={TURN}",
        f"data.max_response_length={BUDGET}",
        mini_batch=4,
    )


@pytest.mark.parametrize("step", [1, 2])
def test_summaries_are_trained_as_turns(summarizing: Run, model: Path, step: int) -> None:
    summarizing.holds_each_turn_once(step, AutoTokenizer.from_pretrained(model))
    assert summarizing.metrics[step]["training/rollout_probs_diff_max"] < 1e-4
    summarizing.agrees_with(naive.gigpo, step)


def test_a_summary_follows_a_full_conversation(summarizing: Run) -> None:
    episodes = [e for split in ("train", "val") for e in summarizing.episodes(split)]
    assert not any(e["failed"] for e in episodes)
    for episode in episodes:
        requests = [text["first_observation"] == "Sum up." for text in episode["texts"]]
        assert [str(turn["anchor"]).startswith("summary of ") for turn in episode["steps"]] == requests
        assert not requests[0]
    assert any(str(turn["anchor"]).startswith("summary of ") for e in episodes for turn in e["steps"])
