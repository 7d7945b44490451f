"""The launch scripts for GPU clusters: their overrides compose on verl, pass our checks and are the paper's."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from contract_tools import Compose
from verl.trainer.ppo.utils import need_critic

from verl_turnkey.advantage import estimators
from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.checks.validate import check

SCRIPTS = Path(__file__).parents[3] / "examples" / "launch"


def overrides(script: str, tasks: Path, **env: str) -> list[str]:
    """What the script would launch verl with, one word per line."""
    tasks.mkdir(parents=True, exist_ok=True)
    for split in ("train", "val"):
        write_parquet(tasks / f"{split}.parquet", [Task("", seed) for seed in range(32)], "x", split)
    command = {"LAUNCH": "printf %s\\n", "TASKS": str(tasks), **env}
    found = subprocess.run(
        ["bash", str(SCRIPTS / f"{script}.sh"), "turnkey.env.probe=false"],
        env={**os.environ, **command},
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.splitlines()


@pytest.mark.parametrize(("script", "turns", "method"), [("alfworld", 50, "gigpo"), ("webshop", 15, "hgpo")])
def test_settings_of_the_paper(compose: Compose, tmp_path: Path, script, turns, method):
    config = compose(*overrides(script, tmp_path / "tasks", METHOD=method, MODEL="some/model"))
    check(config, use_critic=need_critic(config))
    assert config.algorithm.adv_estimator == method
    assert method in estimators()
    assert config.turnkey.credit.gamma == 0.95
    assert config.turnkey.env.id == {"alfworld": "turnkey/ALFWorld-v0", "webshop": "turnkey/WebShop-v0"}[script]
    assert (config.turnkey.rollout.max_turns, config.turnkey.rollout.history) == (turns, 2)
    assert config.turnkey.rollout.invalid_action_penalty == 0.1
    assert config.turnkey.rewards == [{"name": "step", "weight": 10}]
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.train_batch_size, rollout.n) == (16, 8)
    assert (actor.optim.lr, actor.use_kl_loss, actor.kl_loss_coef, actor.kl_loss_type) == (
        1e-6,
        True,
        0.01,
        "low_var_kl",
    )
    assert config.trainer.total_training_steps == 150
    assert config.actor_rollout_ref.model.path == "some/model"


def test_the_last_word_is_the_callers(tmp_path: Path):
    assert overrides("alfworld", tmp_path / "tasks")[-1] == "turnkey.env.probe=false"
