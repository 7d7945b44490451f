"""An agent that knows only the URL of a model is trained with credit per turn, on verl's own workers and vLLM."""

from __future__ import annotations

from pathlib import Path

import naive
import pytest
from launch import Run, agent_tasks, data, train
from transformers import AutoTokenizer

AGENT = Path(__file__).with_name("black_box.py")
STEPS = 2


@pytest.fixture(scope="module")
def run(model: Path, out: Path) -> Run:
    """Of the training tasks one breaks the agent, one lets it ask nothing, and one lets it sleep."""
    moods = {1: "broken", 2: "idle", 4: "slow"}
    tasks = [{"seed": seed, "mood": moods.get(seed, "well")} for seed in range(5)]
    agent_tasks(out, "corridor", train=tasks, val=tasks[:4])
    return train(
        out,
        model,
        "+turnkey=gigpo",
        f"turnkey.agent.run={AGENT}:play",
        "turnkey.agent.state=observation",
        "turnkey.agent.timeout=30",
        "turnkey.rollout.max_turns=8",
        "turnkey.rollout.max_tokens_per_turn=8",
        *data(out, batch=5),
        "data.max_prompt_length=256",
        "data.max_response_length=600",
        f"trainer.test_freq={STEPS}",
        steps=STEPS,
    )


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_an_episode_is_a_row_of_what_was_sampled(run: Run, model: Path, step: int) -> None:
    metrics = run.metrics[step]
    assert metrics["rows/per_episode"] == 1
    assert metrics["training/rollout_probs_diff_max"] < 1e-4
    assert metrics["agent/calls"] == metrics["episode/length/mean"] > 1
    assert metrics["agent/overruled/temperature"] == metrics["agent/calls"]
    assert metrics["agent/left_out"] == 0
    run.holds_each_turn_once(step, AutoTokenizer.from_pretrained(model))


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_is_per_turn(run: Run, step: int) -> None:
    run.agrees_with(naive.gigpo, step)
    steps = [record for record in run.steps() if record["global_step"] == step]
    assert len({record["anchor"] for record in steps}) < len(steps), "equal observations are equal states"


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_agents_that_break_down_ask_nothing_or_sleep_cost_their_episodes(run: Run, step: int) -> None:
    assert run.metrics[step]["episode/failed"] == 12
    assert run.metrics[step]["episode/failed/AgentFailure"] == 12
    reasons = {e["failed"] for e in run.episodes("train") if e["failed"] and e["global_step"] == step}
    assert any("the agent made no request" in reason for reason in reasons)
    assert any("the agent ran longer than turnkey.agent.timeout=30" in reason for reason in reasons)
    assert any("ValueError: this agent breaks down on seed 1 (black_box.py:" in reason for reason in reasons)


def test_it_validates(run: Run) -> None:
    assert "val-core/corridor/acc/mean@1" in run.metrics[STEPS]
