"""The notebook runs from its first cell to its last, as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
