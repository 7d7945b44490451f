"""A real language model through the quickstart: fetched, imitating, trained, validated, shown, evaluated."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_turnkey.plugins.view.reading import read

pytestmark = pytest.mark.long

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "run.py"
TURNKEY = Path(sys.executable).with_name("turnkey")
TASKS = 8


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of SmolLM2-135M on errands."""
    out = tmp_path_factory.mktemp("real") / "run"
    options = ["--steps", "2", "--n-val", str(TASKS), "--override", "trainer.save_freq=2"]
    result = subprocess.run([sys.executable, QUICKSTART, "--out", out, *options], text=True, stdout=subprocess.PIPE)
    assert result.returncode == 0, result.stdout[-4000:]
    return out


def metrics(out: Path) -> dict[int, dict[str, float]]:
    lines = (json.loads(line) for path in out.glob("metrics-*.jsonl") for line in path.read_text().splitlines())
    return {line["step"]: line["data"] for line in lines}


def test_it_trains_in_merged_rows_and_both_sides_agree_on_probabilities(trained: Path) -> None:
    steps = metrics(trained)
    assert set(steps) == {0, 1, 2}
    for step in (1, 2):
        # bf16 on both sides, where the processor has it: by other kernels, so a difference, but a small one.
        assert steps[step]["training/rollout_probs_diff_mean"] < 0.02
        assert steps[step]["actor/grad_norm"] > 0
        assert steps[step]["episode/failed"] == 0
    episodes = read(trained / "turnkey_log", "episodes")
    turns = read(trained / "turnkey_log", "turns")
    rows = turns[turns["episode"].isin(episodes[episodes["split"] == "train"]["episode"])].groupby("episode")["row"]
    assert (rows.nunique() == 1).all(), "a conversation is one row"
    assert (trained / "view.html").stat().st_size > 100_000


def test_some_of_its_actions_are_valid_from_the_start(trained: Path) -> None:
    summary = json.loads((trained / "summary.json").read_text())
    assert summary["invalid_before"] < 0.7
    assert 0 <= summary["success_before"] <= 0.8
    assert summary["n_val"] == TASKS


def test_its_checkpoint_is_evaluated(trained: Path, tmp_path: Path) -> None:
    checkpoint = trained / "checkpoints" / "global_step_2"
    options = ["--checkpoint", checkpoint, "--tasks", trained / "tasks" / "val.parquet", "--greedy", "--out", tmp_path]
    sizes = ["data.max_prompt_length=160", "data.max_response_length=400"]
    subprocess.run([TURNKEY, "eval", "errands", *options, *sizes], check=True, timeout=900)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["complete"], result["samples"]) == (True, TASKS)
    assert result["success"]["value"] >= 0.25  # greedy, after a warm start: better than sampled
