"""The script that times the whole advantage step, on a few rows."""

from __future__ import annotations

import sys
from pathlib import Path

from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_turnkey.plugins.trainer.trainer import TurnkeyTrainerSync

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import advantage_step


def test_both_steps_run_on_the_same_rows(queue) -> None:
    rows = 120
    batch = advantage_step.fill(rows, tokens=6)
    assert len(batch.keys) == rows
    for trainer, method in ((PPOTrainerSync, "grpo"), (TurnkeyTrainerSync, "gigpo")):
        assert advantage_step.seconds(trainer(advantage_step.configuration(method, rows)), batch, repeats=1) > 0
