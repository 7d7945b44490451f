"""Several epochs per batch, ever more off-policy: clipping by tokens, clipping by turns, and a scaled gradient.

    python benchmarks/stability.py run      # train missing runs (10 minutes each on 2 cores), then the table
    python benchmarks/stability.py table    # print the table and draw the curves from finished runs

The quickstart's task and model under one method and four policy losses, seeds 0, 1, 2, with `ppo_epochs` passes over
each batch. Every run has its own folder under runs/stability; an unfinished one (without summary.json) starts again.
"""

from __future__ import annotations

import json
from itertools import pairwise
from statistics import mean, median, stdev

import typer
from quickstart_runs import ROOT, train_missing

from verl_turnkey.plugins.view.compare import compare, draw
from verl_turnkey.plugins.view.runs import Run, read

RUNS = ROOT / "runs" / "stability"
LOSSES, SEEDS = ("vanilla", "turn_ratio", "s_ppo", "st_ppo"), (0, 1, 2)
METHOD, EPOCHS, MINI_BATCHES = "gigpo", 6, 2  # the last is the quickstart's
CLIPPED, KL, SUCCESS = "actor/pg_clipfrac", "actor/ppo_kl", "episode/success_rate"

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def run(steps: int = 12) -> None:
    """Train the missing runs, one seed after the other."""
    for seed in SEEDS:
        for loss in LOSSES:
            overrides = (f"+turnkey/loss={loss}", f"actor_rollout_ref.actor.ppo_epochs={EPOCHS}")
            options = tuple(word for override in overrides for word in ("--override", override))
            train_missing(RUNS / f"{loss}-{seed}", method=METHOD, seed=seed, steps=steps, options=options)
    table()


@app.command()
def table() -> None:
    """Print the table and draw the curves from finished runs."""
    by_loss = {
        loss: [read(out) for out in sorted(RUNS.glob(f"{loss}-*")) if (out / "summary.json").exists()]
        for loss in LOSSES
    }
    print(
        "| loss | seeds | success after | after one update | largest fall | clip fraction | KL to the old policy | "
        "largest KL | scale | second pass |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for loss, rows in by_loss.items():
        if rows:
            clip, kl = (mean(mean(column(row, name)) for row in rows) for name in (CLIPPED, KL))
            worst = max(max(column(row, KL)) for row in rows)
            scales = [value for row in rows for value in column(row, "actor/clipping_bias/scale")]
            after = [json.loads((row.folder / "summary.json").read_text())["success_after"] for row in rows]
            spread = f" ± {stdev(after):.3f}" if len(after) > 1 else ""
            success = [column(row, SUCCESS) for row in rows]
            fall = max(before - now for curve in success for before, now in pairwise(curve))
            scale = f"{mean(scales):.2f}" if scales else "-"
            shares = [
                EPOCHS * MINI_BATCHES * extra / update
                for row in rows
                for extra, update in zip(
                    column(row, "actor/clipping_bias/seconds"), column(row, "timing_s/update_actor"), strict=False
                )
            ]
            share = f"{median(shares):.0%} of the update" if shares else "-"
            print(
                f"| {loss} | {len(rows)} | {mean(after):.3f}{spread} | {mean(curve[1] for curve in success):.2f} | "
                f"{fall:.2f} | {clip:.3f} | {kl:.4f} | {worst:.3f} | {scale} | {share} |"
            )
    print(
        f"\n+turnkey={METHOD}, ppo_epochs={EPOCHS}; means over all training steps and seeds. After one update: success "
        "in the second step. Largest fall: of success from one step to the next, in any seed"
    )
    if runs := [row for rows in by_loss.values() for row in rows]:
        panels = [compare(runs, metric=name, by=["loss"]) for name in (CLIPPED, KL, SUCCESS)]
        draw(panels, RUNS / "stability.png")
        print(f"curves: {RUNS / 'stability.png'}")


def column(run: Run, key: str) -> list[float]:
    """A metric of every training step; empty if it was not logged."""
    return run.curve(key)[1].tolist() if key in run.metrics else []


if __name__ == "__main__":
    app()
