"""Does it learn, and what does step-level credit bring? The quickstart's task under several methods and seeds.

    python benchmarks/learning.py run      # train what is missing (about 7 minutes a run on 2 cores), then the table
    python benchmarks/learning.py table    # print the tables and draw the curves from the runs that are there

Every run starts from the same warm-started model of its seed and takes the same number of training steps and episodes.
Each has a folder of its own under runs/learning; a finished one (summary.json) is kept, an interrupted one starts
again.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import typer
from quickstart_runs import ROOT, train_missing

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
    """Print the tables and draw the curves from the summaries that are there."""
    found = [json.loads(path.read_text()) for path in RUNS.glob("*/summary.json")]
    found.sort(key=lambda s: (METHODS.index(s["method"]), s["seed"]))
    print("| method | seed | success before | after | area | length after | invalid after | shared | no credit |")
    print("|---|---|---|---|---|---|---|---|---|")
    for s in found:
        success = f"{s['success_before']:.3f} | **{s['success_after']:.3f}** | {area(s):.3f}"
        shares = f"{s['share_steps_in_anchor_groups']:.0%} | {1 - s['share_steps_with_credit']:.0%}"
        play = f"{s['length_after']:.1f} | {s['invalid_after']:.1%}"
        print(f"| {s['method']} | {s['seed']} | {success} | {play} | {shares} |")
    by_method = {m: [s for s in found if s["method"] == m] for m in METHODS}
    print("\n| method | seeds | success after | lowest | area |")
    print("|---|---|---|---|---|")
    for method, rows in by_method.items():
        if rows:
            after, areas = ([f(s) for s in rows] for f in (lambda s: s["success_after"], area))
            print(f"| {method} | {len(rows)} | {spread(after)} | {min(after):.3f} | {spread(areas)} |")
    if found:
        first = found[0]
        print(
            f"\n{first['train_steps']} steps of 64 episodes, {first['n_val']} held-out tasks. area: mean success over "
            "the validation curve; shared: training steps whose state occurs at least twice in their group; no credit: "
            "training steps whose advantage is exactly 0"
        )
        draw(by_method, RUNS / "learning.png")
        print(f"curves: {RUNS / 'learning.png'}")


def area(summary: dict[str, Any]) -> float:
    """Area under the validation curve by trapezoids, divided by the number of steps: a mean success."""
    curve = sorted((int(step), success) for step, success in summary["validation"].items())
    return sum((b - a) * (u + v) / 2 for (a, u), (b, v) in pairwise(curve)) / (curve[-1][0] - curve[0][0])


def spread(values: list[float]) -> str:
    return f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


def draw(by_method: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Mean validation success of each method, and its seeds as thin lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, (method, rows) in enumerate(by_method.items()):
        curves = [{int(step): success for step, success in s["validation"].items()} for s in rows]
        for curve in curves:
            axes.plot(curve.keys(), curve.values(), color=f"C{color}", linewidth=0.7, alpha=0.4)
        if curves:
            steps = sorted(curves[0])
            means = [mean(curve[step] for curve in curves) for step in steps]
            axes.plot(steps, means, color=f"C{color}", linewidth=2, marker="o", label=method)
    axes.set(xlabel="training step", ylabel="success on held-out tasks", ylim=(0, 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    app()
