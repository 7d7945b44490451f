"""The quickstart over seeds and methods, and the tables of docs/quickstart.md.

    python benchmarks/quickstart_seeds.py run     # what is not there yet; one folder per run
    python benchmarks/quickstart_seeds.py table              # print the tables

A run that was interrupted is started again; a finished one (summary.json) is kept.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean

import typer

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "seeds"
METHODS, SEEDS = ("gigpo", "grpo_steps"), (0, 1, 2)

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def run(steps: int = 20) -> None:
    """Train what is missing."""
    for seed in SEEDS:
        for method in METHODS:
            out = RUNS / f"{method}-{seed}"
            if not (out / "summary.json").exists():
                script = ROOT / "examples" / "quickstart" / "run.py"
                options = ["--method", method, "--seed", str(seed), "--steps", str(steps), "--out", str(out)]
                subprocess.run([sys.executable, str(script), *options], check=True)
    table()


@app.command()
def table() -> None:
    """Print the tables from the summaries that are there."""
    found = [json.loads(path.read_text()) for path in sorted(RUNS.glob("*/summary.json"))]
    print("| method | seed | success before | after | length before | after | invalid before | after | "
          "steps in anchor groups | steps with step credit |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|")
    for s in sorted(found, key=lambda s: (s["method"], s["seed"])):
        shares = [f"{s[key]:.0%}" if s[key] is not None else "-" for key in
                  ("share_steps_in_anchor_groups", "share_steps_with_step_credit")]  # fmt: skip
        print(f"| {s['method']} | {s['seed']} | {s['success_before']:.3f} | **{s['success_after']:.3f}** | "
              f"{s['length_before']:.1f} | {s['length_after']:.1f} | {s['invalid_before']:.1%} | "
              f"{s['invalid_after']:.1%} | {shares[0]} | {shares[1]} |")  # fmt: skip
    for method in METHODS:
        rows = [s for s in found if s["method"] == method]
        if rows:
            gain = mean(s["success_after"] - s["success_before"] for s in rows)
            print(f"\n{method}: mean gain {gain:+.3f} over {len(rows)} seeds, {rows[0]['train_steps']} steps, "
                  f"{rows[0]['n_val']} held-out tasks")  # fmt: skip
    parts = list(found[0]["seconds_per_step"]) if found else []
    print("\n| seconds per training step | " + " | ".join(parts) + " |")
    print("|---" * (len(parts) + 1) + "|")
    for method in METHODS:
        rows = [s["seconds_per_step"] for s in found if s["method"] == method]
        if rows:
            print(f"| {method} | " + " | ".join(f"{mean(r[part] for r in rows):.2f}" for part in parts) + " |")


if __name__ == "__main__":
    app()
