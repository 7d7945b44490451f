"""Does it learn, and what does step-level credit bring? The quickstart's task under several methods and seeds.

    python benchmarks/learning.py run      # train what is missing (about 7 minutes a run on 2 cores), then the table
    python benchmarks/learning.py table    # print the tables and draw the curves from the runs that are there

Every run starts from the same warm-started model of its seed and takes the same number of training steps and episodes.
Each has a folder of its own under runs/learning; a finished one (summary.json) is kept, an interrupted one starts
again.
"""

from __future__ import annotations

import json

import typer
from quickstart_runs import ROOT, train_missing

from verl_turnkey.plugins.seeing import report
from verl_turnkey.plugins.seeing.compare import compare
from verl_turnkey.plugins.seeing.runs import read

RUNS = ROOT / "runs" / "learning"
METHODS, SEEDS = ("grpo_steps", "gigpo", "hgpo", "salt", "proxmo"), (0, 1, 2)
VALIDATE_EVERY = 5

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def run(steps: int = 20, methods: str = ",".join(METHODS)) -> None:
    """Train what is missing, one seed after the other so that a part of the runs can be compared already."""
    for seed in SEEDS:
        for method in methods.split(","):
            options = ("--validate-every", str(VALIDATE_EVERY))
            train_missing(RUNS / f"{method}-{seed}", method=method, seed=seed, steps=steps, options=options)
    table()


@app.command()
def table() -> None:
    """Print the tables and draw the curves from the runs that are there."""
    done = {path.parent: json.loads(path.read_text()) for path in RUNS.glob("*/summary.json")}
    folders = sorted(done, key=lambda folder: (METHODS.index(done[folder]["method"]), done[folder]["seed"]))
    if not folders:
        print(f"no finished run in {RUNS}")
        return
    found = compare([read(folder) for folder in folders], metric="val success", by=["method"])
    areas = [area for group in found["groups"] for area in group["area"]["of_runs"]]
    print("| method | seed | success before | after | area | length after | invalid after | shared | no credit |")
    print("|---|---|---|---|---|---|---|---|---|")
    for s, area in zip((done[folder] for folder in folders), areas, strict=True):
        success = f"{s['success_before']:.3f} | **{s['success_after']:.3f}** | {area:.3f}"
        shares = f"{s['share_steps_in_anchor_groups']:.0%} | {1 - s['share_steps_with_credit']:.0%}"
        play = f"{s['length_after']:.1f} | {s['invalid_after']:.1%}"
        print(f"| {s['method']} | {s['seed']} | {success} | {play} | {shares} |")
    print(f"\n{report.markdown(report.tables(found)[0])}")
    first = done[folders[0]]
    print(
        f"{first['train_steps']} steps of 64 episodes, {first['n_val']} of each validation. area: mean success over "
        "the validation curve; shared: training steps whose state occurs at least twice in their group; no credit: "
        "training steps whose advantage is exactly 0"
    )
    report.draw([found], RUNS / "learning.png")
    print(f"curves: {RUNS / 'learning.png'}")


if __name__ == "__main__":
    app()
