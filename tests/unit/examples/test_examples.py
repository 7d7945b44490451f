"""The quickstart's summary, from metrics files as verl writes them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "quickstart"))

from report import draw, read_metrics, summarise

SETUP = {"method": "gigpo", "seed": 3, "n_val": 128, "seconds_setup": 40.0, "seconds_train": 200.0}


def validation(success: float) -> dict[str, float]:
    return {
        "val-core/doorkey/acc/mean@1": success,
        "val-aux/doorkey/episode_length/mean@1": 20 - 10 * success,
        "val-aux/doorkey/invalid_rate/mean@1": 0.01,
    }


def training(step: int, share: float) -> dict[str, float]:
    return {
        "episode/success_rate": 0.5,
        "credit/share_steps_in_anchor_groups": 0.9,
        "credit/share_steps_with_step_credit": share,
        "timing_s/step": 100.0 if step == 1 else 10.0,
        "timing_s/gen": 5.0,
    }


def write(path: Path, lines: dict[int, dict[str, float]]) -> None:
    path.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in lines.items()))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that was interrupted in its third step and resumed after its second."""
    write(tmp_path / "metrics-1.jsonl", {0: validation(0.25), 1: training(1, 0.2), 2: training(2, 0.4), 3: {"x": 0}})
    write(
        tmp_path / "metrics-2.jsonl", {2: validation(0.5), 3: training(3, 0.6), 4: training(4, 0.8) | validation(0.75)}
    )
    return tmp_path


def test_summary_of_a_resumed_run(run: Path) -> None:
    summary = summarise(read_metrics(run), SETUP, steps=4)
    assert (summary["success_before"], summary["success_after"]) == (0.25, 0.75)
    assert (summary["length_before"], summary["length_after"]) == (17.5, 12.5)
    assert (summary["n_val"], summary["train_steps"], summary["seed"]) == (128, 4, 3)
    assert (summary["seconds_setup"], summary["seconds_train"]) == (40.0, 200.0)
    assert summary["share_steps_in_anchor_groups"] == pytest.approx(0.9)
    assert summary["share_steps_with_step_credit"] == pytest.approx(0.5)
    assert summary["seconds_per_step"]["step"] == 10.0, "without the first step, which warms up"
    assert set(summary["versions"]) >= {"verl-turnkey", "verl", "torch", "ray"}
    json.dumps(summary)


def test_the_curve_is_drawn(run: Path) -> None:
    metrics = read_metrics(run)
    draw(metrics, summarise(metrics, SETUP, steps=4), run / "curve.png")
    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_without_both_validations_is_no_result(tmp_path: Path) -> None:
    write(tmp_path / "metrics-1.jsonl", {0: validation(0.25), 1: training(1, 0.2)})
    with pytest.raises(SystemExit, match="before and after"):
        summarise(read_metrics(tmp_path), SETUP, steps=1)


# --- The notebook runs from its first cell to its last, as it is ------------------------------------------------------
NOTEBOOK = Path(__file__).parents[3] / "examples" / "first_ten_minutes.ipynb"


def test_it_runs_and_keeps_no_output(tmp_path: Path) -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    script = tmp_path / "notebook.py"
    script.write_text("\n".join("".join(cell["source"]) for cell in cells), encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("      0 ")]
    trajectory_level = {row[-2] for row in rows}
    turn_level = {row[-1] for row in rows}
    assert len(trajectory_level) == 1 < len(turn_level), done.stdout
