"""VinePPO on MiniGrid: values by fresh rollouts from each state, which train nothing themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import naive
import numpy as np
import pytest
from launch import Run, minigrid, train
from transformers import AutoTokenizer

POLICY = Path(__file__).with_name("word_policy.py")
TURNS, STEPS, ROLLOUTS = 4, 2, 3
LEVEL = {"level": "MiniGrid-Empty-Random-5x5-v0", "max_steps": TURNS}


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The reward is the number of steps ahead, so that values differ from state to state."""
    out = tmp_path_factory.mktemp("branching")
    return train(
        out,
        "+turnkey=progress",
        "+turnkey/env=babyai",
        "+turnkey/device=cpu",
        *minigrid(out, LEVEL, train=8, val=4, seed=1),
        "turnkey.credit.alpha=0",
        f"turnkey.rollout.strategy={{name: vine, rollouts: {ROLLOUTS}}}",
        f"turnkey.rewards=[{{name: '{POLICY}:forward'}}]",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-4",
        f"trainer.total_training_steps={STEPS}",
    )


def vine(steps: list[dict[str, Any]]) -> list[float]:
    return naive.progress([each | each["extra"] for each in steps], alpha=0)


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_is_that_of_the_values_that_were_measured(run: Run, step: int) -> None:
    run.agrees_with(vine, step)
    extra = [each["extra"] for each in run.steps() if each["global_step"] == step]
    assert {each["value_rollouts"] for each in extra} == {ROLLOUTS}
    values = np.array([each["turn_value"] for each in extra])
    np.testing.assert_allclose(values * ROLLOUTS, (values * ROLLOUTS).round(), atol=1e-9)
    assert len(set(values.round(6))) > 3
    assert 0 <= values.min() < values.max() <= TURNS


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_what_is_measured_is_not_trained(run: Run, model: Path, step: int) -> None:
    run.holds_each_turn_once(step, AutoTokenizer.from_pretrained(model))
    metrics = run.metrics[step]
    turns = metrics["episode/length/mean"]
    assert metrics["episode/count"] == 8
    assert metrics["branching/forks"] == turns
    assert metrics["branching/measured"] == ROLLOUTS * turns
    assert metrics["branching/failed"] == metrics["branching/trained"] == 0
    assert metrics["branching/measured_tokens"] > metrics["rows/trained_tokens"] / 8
    assert metrics["actor/grad_norm"] > 0
    assert metrics["training/rollout_probs_diff_max"] < 1e-4


def test_values_are_those_of_the_policy(run: Run) -> None:
    """What an estimate says is to come is, on average over all states, what comes."""
    come: list[float] = []
    for episode in run.episodes("train"):
        rewards = [each["reward"] for each in episode["steps"]]
        come += [sum(rewards[t:]) for t in range(len(rewards))]
    said = [each["extra"]["turn_value"] for each in run.steps()]
    assert len(said) == len(come) > 30
    spread = np.std(np.array(come)) * np.sqrt(TURNS / len(come))
    assert abs(np.mean(said) - np.mean(come)) < 4 * spread
