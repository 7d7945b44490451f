"""The scores that a reward model is compared with, and its own, on a log and a model of a few thousand parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
from synthetic_run import write
from typer.testing import CliRunner

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import prm_from_log  # noqa: E402
from prm_from_log import BOTH, SEEN, TURN  # noqa: E402

from verl_turnkey.plugins.cli.main import app  # noqa: E402


def test_baselines_are_means_of_training_labels():
    train = [
        {"episode": "a", "turn": 0, "label": 1.0},
        {"episode": "a", "turn": 1, "label": 0.0},
        {"episode": "b", "turn": 0, "label": 0.5},
    ]
    test = [{"episode": "c", "turn": 0}, {"episode": "c", "turn": 1}, {"episode": "c", "turn": 2}]
    seen = {("a", 0): False, ("a", 1): True, ("b", 0): False, ("c", 0): False, ("c", 1): False, ("c", 2): True}
    assert prm_from_log.baselines(train, test, seen) == {
        "prior": [0.5, 0.5, 0.5],
        TURN: [0.75, 0.0, 0.5],
        SEEN: [0.75, 0.75, 0.0],
        BOTH: [0.75, 0.5, 0.5],
    }


def test_the_table_of_a_log(tmp_path: Path, model_dir: Path):
    write(tmp_path / "run", episodes=60, turns=6, steps=2)
    arguments = ["prm", "data", str(tmp_path / "run"), "--out", str(tmp_path / "prm.parquet"), "--held-out", "0.3"]
    CliRunner().invoke(app, arguments, catch_exceptions=False)
    rows = pd.read_parquet(tmp_path / "prm_held_out.parquet")
    seen = prm_from_log.repeated(tmp_path / "run")
    assert {(e, t) for e, t in rows[["episode", "turn"]].itertuples(index=False)} <= {*seen}
    scores = prm_from_log.scores(model_dir, rows["messages"].head(3))
    assert all(0 < score < 1 for score in scores)
    for name, values in (("trained", rows["label"]), ("untrained", 1 - rows["label"])):
        rows.assign(score=values)[["episode", "turn", "score"]].to_parquet(tmp_path / f"scores_{name}.parquet")
    done = CliRunner().invoke(prm_from_log.app, ["table", str(tmp_path)], catch_exceptions=False)
    cells = {line.split(" | ")[0]: line.split(" | ")[1] for line in done.output.splitlines() if line.count(" | ") > 2}
    assert cells["| SmolLM2, trained"].startswith("1.000")
    assert cells["| SmolLM2, untrained"].startswith("0.000")
    assert cells["| prior"].startswith("0.500")
    test = rows.reset_index(drop=True)
    assert prm_from_log.auc_difference(list(test["label"]), list(1 - test["label"]), test)[0] == pytest.approx(1.0)


def test_a_folder_keeps_to_the_settings_it_was_made_with(tmp_path: Path):
    """Otherwise a model that learned one kind of label would be tested on the other."""
    settings = {"steps": 10, "model": "smollm2", "held_out": 0.3, "label": "outcome"}
    for _ in range(2):
        prm_from_log.keep_settings(tmp_path, **settings)
    words = ["run", str(tmp_path), "--label", "state", "--held-out", "0.5"]
    done = CliRunner().invoke(prm_from_log.app, words)
    assert done.exit_code == 2
    message = " ".join(done.output.replace("│", " ").split())
    assert "was made with --held-out 0.3 --label outcome: repeat that, or choose another folder" in message
    assert {path.name for path in tmp_path.iterdir()} == {"settings.json"}
