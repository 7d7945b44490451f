"""The planner and the executor of examples/agents, one model with an outcome for each, trained with credit by role."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launch import Run, agent_tasks, data, gigpo_by_role, train

AGENT = Path(__file__).parents[2] / "examples" / "agents" / "planner_and_executor.py"
STEPS = 2


@pytest.fixture(scope="module")
def run(model: Path, out: Path) -> Run:
    tasks = [{"numbers": [2, 3, n]} for n in range(4)]
    agent_tasks(out, "sums", train=tasks, val=tasks[:2])
    return train(
        out,
        model,
        "+turnkey=gigpo",
        f"turnkey.agent.run={AGENT}:play",
        "turnkey.rollout.max_tokens_per_turn=8",
        *data(out, batch=4),
        "data.max_prompt_length=256",
        "data.max_response_length=600",
        f"trainer.test_freq={STEPS}",
        steps=STEPS,
    )


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_credit_is_that_of_each_role_alone(run: Run, step: int) -> None:
    run.agrees_with(gigpo_by_role, step)
    advantages = [row.abs().max().item() for (row,) in run.rows(step, "advantages")]
    assert max(advantages) > 0


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_a_role_s_conversation_is_a_row_and_its_outcome_is_on_its_last_turn(run: Run, step: int) -> None:
    assert run.metrics[step]["rows/per_episode"] == 2
    assert run.metrics[step]["training/rollout_probs_diff_max"] < 1e-4
    for episode in (e for e in run.episodes("train") if e["global_step"] == step):
        assert episode["failed"] is None
        steps = episode["steps"]
        extras = [json.loads(s["extra"]) for s in steps]
        assert [extra["role"] for extra in extras] == ["planner", "executor"] * 2
        assert [s["reward"] for s in steps] == [0, 0, extras[2]["role_outcome"], extras[3]["role_outcome"]]
        assert len({s["row"] for s in steps}) == 2


def test_it_validates(run: Run) -> None:
    assert "val-core/sums/acc/mean@1" in run.metrics[STEPS]
