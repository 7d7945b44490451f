"""How near is a method's credit to the exact advantage? To judge an idea before a GPU is spent on it.

    python benchmarks/credit_quality.py run gigpo loo_td              # registered names
    python benchmarks/credit_quality.py run my_credit.py:mine         # one that a file of yours registers
    python benchmarks/credit_quality.py run loo_td,lam=0.8            # with other parameters
    python benchmarks/credit_quality.py run grpo_steps gigpo hgpo graph loo_td --save    # the page's table
    python benchmarks/credit_quality.py table                         # the kept ones

On tasks whose values are known (``known_values.py``), batches of 64 episodes in groups of 8 are played by several
policies. A cell has two cosines with the exact policy gradient: that of one batch, the mean of 32, which is less than 1
for noise and bias; and that of the sum of the 32, where bias is left. Exact advantages are the bound: only which steps
were played is chance. Some minutes on one core for a method.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import yaml
from known_values import Batch, Family, Floats, cosine, dense, dialogue, doorkey, maze
from page_tables import packages

from verl_turnkey.advantage import compute_credit, estimators
from verl_turnkey.envs.user_modules import import_modules
from verl_turnkey.plugins.cli.tables import write_between

RESULTS = Path(__file__).parent / "results" / "credit_quality.json"
PAGE = Path(__file__).parent / "results" / "README.md"
EPISODES, BATCHES, POLICIES = 64, 32, 3
EXACT = "exact"
FAMILIES: dict[str, Callable[[int], Family]] = {
    "maze, success .2": lambda seed: maze(seed, 0.2),
    "maze .4": lambda seed: maze(seed, 0.4),
    "maze .6": lambda seed: maze(seed, 0.6),
    "DoorKey .4": lambda seed: doorkey(seed, 0.4),
    "random games, dense rewards": dense,
    "DoorKey .4, state = history": lambda seed: doorkey(seed, 0.4, "history"),
    "maze .6, no state recurs": lambda seed: maze(seed, 0.6, "never"),
    "dialogue .4": lambda seed: dialogue(seed, 0.4),
}
app = typer.Typer(add_completion=False, no_args_is_help=True)
Method = Callable[[Batch], Floats]


def method(name: str) -> tuple[str, Method]:
    """NAME or FILE.py:NAME, each with ``,key=value`` for parameters: how it is called, and its advantages.

    Raises:
        typer.BadParameter: nobody registers it.
    """
    path, *settings = name.split(",")
    file, _, registered = path.rpartition(":")
    if file:
        import_modules([file], "METHOD", ())
    if registered not in estimators():
        raise typer.BadParameter(f"expected one of {', '.join(sorted(estimators()))}, or FILE.py:NAME, got {path!r}")
    params = {key: yaml.safe_load(value) for key, _, value in (setting.partition("=") for setting in settings)}
    label = ", ".join([registered, *(f"{key} {value}" for key, value in params.items())])
    return label, lambda batch: compute_credit(registered, batch.steps, **params).advantage


def measure(family: Family, methods: dict[str, Method], batches: int, seed: int) -> dict[str, tuple[float, float]]:
    """Of each method, and of exact advantages, the mean cosine of a batch and the cosine of the sum."""
    draw = np.random.default_rng(seed)
    methods = {**methods, EXACT: lambda batch: batch.exact}
    estimates: dict[str, list[Floats]] = {name: [] for name in methods}
    truths = []
    for _ in range(batches):
        batch, truth = family.draw(EPISODES, draw)
        truths.append(truth)
        for name, advantage in methods.items():
            estimates[name].append(family.gradient(batch, advantage(batch)))
    return {
        name: (
            float(np.mean([cosine(*pair) for pair in zip(of_method, truths, strict=True)])),
            cosine(sum(of_method), sum(truths)),
        )
        for name, of_method in estimates.items()
    }


@app.command()
def run(
    names: Annotated[list[str], typer.Argument(metavar="METHOD...", help="NAME or FILE.py:NAME, with ,key=value")],
    family: Annotated[list[str] | None, typer.Option(help="only these; default: all")] = None,
    policies: int = POLICIES,
    batches: Annotated[int, typer.Option(help="of 64 episodes")] = BATCHES,
    save: Annotated[bool, typer.Option("--save", help="keep the results")] = False,
) -> None:
    """Print where each method stands."""
    if unknown := {*(family or ())} - FAMILIES.keys():
        raise typer.BadParameter(f"expected families of {'; '.join(FAMILIES)}, got {'; '.join(sorted(unknown))}")
    methods = dict(method(name) for name in names)
    results: dict[str, Any] = {"batches": batches, "episodes": EPISODES, "packages": packages(), "families": {}}
    for name in family or FAMILIES:
        made = [FAMILIES[name](seed) for seed in range(1, policies + 1)]
        measured = [measure(of_policy, methods, batches, seed) for seed, of_policy in enumerate(made)]
        results["families"][name] = {label: [cells[label] for cells in measured] for label in measured[0]}
        print(tables({**results, "families": {name: results["families"][name]}}), end="\n\n", flush=True)
    if save:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write_between(PAGE, "credit quality", tables(results) + "\n")
    print(tables(results))


@app.command()
def table() -> None:
    """Print the table of the kept results."""
    print(tables(json.loads(RESULTS.read_text())))


def tables(results: dict[str, Any]) -> str:
    """Markdown: a row for each family, a cell for each method; the error is of the mean over policies."""
    families = results["families"]
    names = [*next(iter(families.values()))]
    head = f"| one batch / sum of {results['batches']} | {' | '.join(names)} |\n|---|{'---|' * len(names)}"
    rows = (f"| {family} | {' | '.join(_cells(measured, names))} |" for family, measured in families.items())
    return "\n".join([head, *rows])


def _cells(measured: dict[str, list[tuple[float, float]]], names: Sequence[str]) -> Iterator[str]:
    for name in names:
        single, whole = np.array(measured[name]).T
        error = f" ± {single.std(ddof=1) / np.sqrt(len(single)):.2f}" if len(single) > 1 else ""
        yield f"{single.mean():.2f}{error} / {whole.mean():.3f}"


if __name__ == "__main__":
    app()
