"""Examples that train, cut to a few tasks: the quickstart with its tiny model, and the agent that sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import naive
import pytest
from launch import HERE, Run

from verl_turnkey.plugins.view.join import read

pytestmark = pytest.mark.long

EXAMPLES = Path(__file__).parents[2] / "examples"


def played(script: str, out: Path, *options: str, env: dict[str, str] | None = None) -> dict[str, Any]:
    """The summary of a run of an example."""
    command = [sys.executable, str(EXAMPLES / script), "--out", str(out), "--n-val", "4", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env={**os.environ, **(env or {})})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads((out / "summary.json").read_text())


def test_a_step_of_the_quickstart(tmp_path: Path) -> None:
    out = tmp_path / "run"
    summary = played("quickstart/run.py", out, "--model", "tiny", "--steps", "1")
    assert {"success_before", "success_after"} <= summary.keys()
    assert summary["n_val"] == 4
    assert (out / "view.html").is_file()
    assert (out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_two_steps_of_a_vision_language_model(tmp_path: Path) -> None:
    """Trainer and server see the same pictures, and each turn gets the credit of the naive twin."""
    (tmp_path / "spy").mkdir()
    overrides = (
        f"turnkey.modules=[{EXAMPLES}/vision/grey.py,{HERE}/spy.py]",
        f"turnkey.log.trajectories={tmp_path}/episodes",
        "data.train_batch_size=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=4",
    )
    options = ["--steps", "2", "--demonstrations", "150", *(f"--override={override}" for override in overrides)]
    summary = played("vision/run.py", tmp_path / "run", *options, env={"TURNKEY_SPY": f"{tmp_path}/spy"})
    assert {name: [*by_step] for name, by_step in summary["success"].items()} == {
        name: ["0", "2"] for name in ("pictures", "grey", "random actions")
    }
    [file] = (tmp_path / "run").glob("metrics-*.jsonl")
    metrics = {line["step"]: line["data"] for line in map(json.loads, file.read_text().splitlines())}
    run = Run(tmp_path, metrics)
    for step in (1, 2):
        assert metrics[step]["training/rollout_probs_diff_max"] < 1e-3
        assert metrics[step]["actor/grad_norm"] > 0
        assert metrics[step]["episode/failed"] == 0
        run.agrees_with(naive.gigpo, step)
    turns = read(tmp_path / "episodes", "turns").set_index("episode")
    environments = read(tmp_path / "episodes", "episodes").set_index("episode")["env"]
    pictures = turns.groupby(environments)["images"].nunique()
    assert pictures["turnkey/MiniGrid-v0"] > pictures["vision/GreyMiniGrid-v0"] == 1
