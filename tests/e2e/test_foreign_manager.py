"""Training and validation with agent-loop managers that are not verl's."""

from __future__ import annotations

import os
from pathlib import Path

import naive
import pytest
from launch import Run, minigrid, questions, train

pytestmark = pytest.mark.long

LEVEL = {"level": "MiniGrid-Empty-Random-5x5-v0", "max_steps": 8}
SILENT = "has no agent_loop_workers"


def started(model: Path, out: Path, manager: str, *overrides: str) -> Run:
    """A run of two steps with a validation after each."""
    return train(
        out,
        model,
        "+turnkey=grpo_steps",
        *overrides,
        f"+actor_rollout_ref.rollout.agent.agent_loop_manager_class=own_manager.{manager}",
        "trainer.test_freq=1",
        rollouts=8,
        env={"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])},
    )


def test_verls_manager_behind_another_trains_and_validates(model: Path, tmp_path: Path) -> None:
    run = started(model, tmp_path, "Hidden", *minigrid(tmp_path, LEVEL, seed=1))
    for step in (1, 2):
        assert run.metrics[step]["episode/failed"] == 0
        assert "val-core/doorkey/acc/mean@1" in run.metrics[step]
    # The last step's part of the log stays with workers that nobody can reach.
    run.agrees_with(naive.grpo_steps, 1)
    assert f"the agent-loop manager Hidden {SILENT}" in (tmp_path / "log.txt").read_text()


def test_a_manager_that_writes_its_rows_itself_gets_the_credit_of_the_formula(model: Path, tmp_path: Path) -> None:
    """Its processes, which the trainer never sees, log their episodes with the recorder."""
    run = started(
        model,
        tmp_path,
        "Foreign",
        "actor_rollout_ref.rollout.agent.default_agent_loop=walkers",
        *questions(tmp_path, "walk", "Where do you go?", rows=4),
    )
    for step in (1, 2):
        metrics = run.metrics[step]
        assert (metrics["episode/count"], metrics["episode/failed"], metrics["episode/missing"]) == (32, 0, 0)
        assert metrics["episode/length/mean"] == 3
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert any(name.startswith("val-core/walk/reward/mean") for name in metrics)
        run.agrees_with(naive.grpo_steps, step)
    logged = [episode for episode in run.episodes("train") if episode["global_step"] == 1]
    assert len(logged) == 32
    assert all(episode["texts"][0]["observation"].startswith("You went ") for episode in logged)
    assert f"the agent-loop manager Foreign {SILENT}" in (tmp_path / "log.txt").read_text()
