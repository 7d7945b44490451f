"""Training and validation with an agent-loop manager that is not verl's."""

from __future__ import annotations

import os
from pathlib import Path

import naive
import pytest
from launch import minigrid, train

pytestmark = pytest.mark.long

LEVEL = {"level": "MiniGrid-Empty-Random-5x5-v0", "max_steps": 8}


def test_it_trains_and_validates_with_credit_and_says_what_is_missing(model: Path, tmp_path: Path) -> None:
    run = train(
        tmp_path,
        "+turnkey=grpo_steps",
        "+turnkey/env=babyai",
        "+turnkey/device=cpu",
        *minigrid(tmp_path, LEVEL, train=8, val=4, seed=1),
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=own_manager.Manager",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=8",
        "trainer.total_training_steps=2",
        "trainer.test_freq=1",
        env={"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])},
    )
    assert set(run.metrics) >= {1, 2}
    for step in (1, 2):
        assert run.metrics[step]["episode/failed"] == 0
        assert "val-core/doorkey/acc/mean@1" in run.metrics[step]
    # The last step's part of the log stays with workers that nobody can reach.
    run.agrees_with(naive.grpo_steps, 1)
    assert "the agent-loop manager Manager has no agent_loop_workers" in (tmp_path / "log.txt").read_text()
