"""Do rollouts that branch pay? Learning at about the same number of generated tokens in each step.

    python benchmarks/branching.py run      # train what is missing (about 6 minutes a run on 2 cores), then the table
    python benchmarks/branching.py table    # print the tables and draw the curves from the runs that are there

The quickstart's task and model. Independent episodes under gigpo are held against strategies with the method that is
made for each. These get so many fewer rollouts that a step costs about as many tokens. Curves are over generated
tokens, with those of all branches. Each run has a folder of its own under runs/branching; a finished one
(summary.json) is kept, an interrupted one starts again.
"""

from __future__ import annotations

from typing import NamedTuple

import typer
from quickstart_runs import ROOT, train_missing

from verl_turnkey.plugins.seeing import report
from verl_turnkey.plugins.seeing.compare import compare
from verl_turnkey.plugins.seeing.runs import read

RUNS = ROOT / "runs" / "branching"
SEEDS = (0, 1, 2)
VALIDATE_EVERY = 4


class Variant(NamedTuple):
    """A method with a strategy; ``tasks`` in each step, ``rollouts`` of each."""

    method: str
    strategy: str
    tasks: int
    rollouts: int
    overrides: tuple[str, ...] = ()

    def options(self) -> tuple[str, ...]:
        """Of the quickstart's script."""
        overrides = (
            f"turnkey.rollout.strategy={self.strategy}",
            f"data.train_batch_size={self.tasks}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={self.tasks // 2}",
            f"actor_rollout_ref.rollout.n={self.rollouts}",
            *self.overrides,
        )
        return ("--validate-every", str(VALIDATE_EVERY), *(w for each in overrides for w in ("--override", each)))


VARIANTS = {
    "independent": Variant("gigpo", "independent", 8, 8),
    "vine": Variant("progress", "{name: vine, rollouts: 2, every: 4}", 4, 3, ("turnkey.credit.alpha=0",)),
    "tree": Variant("tree", "{name: tree, first: 4, every: 4, depth: 2}", 8, 3),
}

app = typer.Typer(add_completion=False, no_args_is_help=True)


@app.command()
def run(steps: int = 12, variants: str = ",".join(VARIANTS), seeds: str = ",".join(map(str, SEEDS))) -> None:
    """Train what is missing, one seed after the other."""
    for seed in map(int, seeds.split(",")):
        for name in variants.split(","):
            variant = VARIANTS[name]
            out = RUNS / f"{name}-{seed}"
            train_missing(out, method=variant.method, seed=seed, steps=steps, options=variant.options())
    table()


@app.command()
def table() -> None:
    """Print the tables and draw the curves from the runs that are there."""
    folders = [out for name in VARIANTS for out in sorted(RUNS.glob(f"{name}-*")) if (out / "summary.json").exists()]
    if not folders:
        print(f"no finished run in {RUNS}")
        return
    runs = [read(folder) for folder in folders]
    print("| run | steps | tokens in a step | turns in a step | success before | after |\n|---|---|---|---|---|---|")
    for found in runs:
        steps, success = found.curve(next(name for name in found.metrics if name.endswith("/acc/mean@1")))
        tokens, turns = found.tokens(), found.interactions()
        assert tokens is not None
        assert turns is not None
        each = f"{tokens[-1] / steps[-1]:.0f} | {turns[-1] / steps[-1]:.0f}"
        print(f"| {found.folder.name} | {steps[-1]} | {each} | {success[0]:.3f} | {success[-1]:.3f} |")
    compared = compare(runs, metric="val success", x="tokens")
    print(f"\n{report.markdown(report.tables(compared)[0])}")
    report.draw([compared], RUNS / "branching.png")
    print(f"curves: {RUNS / 'branching.png'}")


if __name__ == "__main__":
    app()
