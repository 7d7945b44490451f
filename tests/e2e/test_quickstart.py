"""``examples/quickstart.sh --model tiny``, cut to one step: tasks, a warm start, training, the summary and the page."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

RUN = Path(__file__).parents[2] / "examples" / "quickstart" / "run.py"


def test_a_step_of_the_quickstart(tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = ["--model", "tiny", "--steps", "1", "--n-val", "4", "--out", str(out)]
    done = subprocess.run([sys.executable, str(RUN), *small], capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    summary = json.loads((out / "summary.json").read_text())
    assert {"success_before", "success_after"} <= summary.keys()
    assert summary["n_val"] == 4
    assert (out / "view.html").is_file()
    assert (out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "1"
