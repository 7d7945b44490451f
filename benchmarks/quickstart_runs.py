"""One run of the quickstart in its own folder, for benchmarks that compare several."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def train_missing(out: Path, *, method: str, seed: int, steps: int, options: tuple[str, ...] = ()) -> None:
    """Train into ``out`` unless it has a finished run (summary.json); ``options`` are further ones of the script."""
    if (out / "summary.json").exists():
        return
    script = ROOT / "examples" / "quickstart" / "run.py"
    usual = ["--model", "tiny", "--method", method, "--seed", str(seed), "--steps", str(steps), "--out", str(out)]
    subprocess.run([sys.executable, str(script), *usual, *options], check=True)
