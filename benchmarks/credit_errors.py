"""Variance and bias of each method's advantages, also where states rarely recur.

    python benchmarks/credit_errors.py run NAME=FOLDER ...    # models or checkpoints of the quickstart's task
    python benchmarks/credit_errors.py pages                  # write the tables of results/README.md

Against exact values, on the batches of ``credit_quality.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Annotated, Any

import credit_quality
import numpy as np
import typer
from credit_quality import (
    EPISODES,
    EXACT,
    LEVEL,
    METHODS,
    SEEDS,
    SOLVED,
    USUAL_GROUP,
    USUAL_HORIZON,
    VINE_ALL,
    Batch,
    Tally,
    World,
    cosine_cell,
    unrolled,
    vine,
)
from exact_values import WON, WORDS, Floats, Ints, different
from page_tables import packages
from reinforce import REINFORCE, reinforce

from verl_turnkey.advantage import StepBatch
from verl_turnkey.advantage.group_ops import describe_groups, joint_codes
from verl_turnkey.plugins.cli.tables import write_between

RESULTS = Path(__file__).parent / "results" / "credit_errors.json"
PAGE = Path(__file__).parent / "results" / "README.md"
EVERY = 3
"""use one in so many of the different starts, so that situations recur in several batches"""
BLOCKS = 10
"""of batches, for jackknife standard errors"""
STATE, TURN, NUMBER, HISTORY = "state", "state and last turn", "state and number of the turn", "whole history"
KEYS = (STATE, TURN, NUMBER, HISTORY)
"""from coarse to fine: no two episodes share a history for long"""
KEYED = ("grpo_steps", "gigpo", "hgpo", "salt", "graph")

app = typer.Typer(add_completion=False, no_args_is_help=True)


def errors(advantage: Floats, exact: Floats, cell: Ints, batch: Ints) -> dict[str, float]:
    """Variance and squared bias of advantages (S,), relative to the mean squared exact advantage.

    A cell is one action in one situation with one number of turns left: its exact advantage is a number ``A``, its
    estimate ``a`` is random with mean ``m``. Estimates are first scaled by the ``c`` with ``c E[a A] = E[A^2]``. Then
    ``variance`` is ``c^2 E[(a - m)^2] / E[A^2]`` and ``bias`` is ``E[(c m - A)^2] / E[A^2]``; they sum to the mean
    squared error.

    ``E[m^2]`` is the mean product of two estimates of a cell from different batches, which are independent, unlike two
    of one batch. So both numbers converge with more batches; a small ``bias`` may come out below 0. ``measured``: the
    share of the steps whose cell is in several batches; all expectations are over these.
    """
    cell, _ = joint_codes(cell, np.zeros_like(cell))
    part, _ = joint_codes(cell, batch)
    n, total = np.bincount(cell), np.bincount(cell, advantage)
    of = np.empty(part.max() + 1, dtype=np.int64)
    of[part] = cell
    pairs = n**2 - np.bincount(of, np.bincount(part).astype(float) ** 2)
    products = total**2 - np.bincount(of, np.bincount(part, advantage) ** 2)
    several = pairs > 0.5
    inside = several[cell]
    true, common = np.mean(exact[inside] ** 2), np.mean(advantage[inside] * exact[inside])
    of_means = (n[several] * products[several] / pairs[several]).sum() / n[several].sum()
    scale = true / common**2
    return {
        "variance": float(scale * (np.mean(advantage[inside] ** 2) - of_means)),
        "bias": float(scale * of_means - 1),
        "measured": float(np.mean(inside)),
    }


def with_errors(advantage: Floats, exact: Floats, cell: Ints, batch: Ints) -> dict[str, float]:
    """:func:`errors`, with jackknife standard errors of the first two over blocks of batches."""
    whole = errors(advantage, exact, cell, batch)
    left_out = [
        errors(*(column[batch % BLOCKS != block] for column in (advantage, exact, cell, batch)))
        for block in range(BLOCKS)
    ]
    spread = {
        f"{name}_error": float(np.std([estimate[name] for estimate in left_out]) * np.sqrt(BLOCKS - 1))
        for name in ("variance", "bias")
    }
    return whole | spread


def keyed(world: World, batch: Batch, name: str) -> StepBatch:
    """The batch with the keys of one of ``KEYS``, before each step and after it."""
    games = [world.games[g] for g in batch.game]
    there = [int(game.following[s, a]) for game, s, a in zip(games, batch.situation, batch.action, strict=True)]
    before: list[Hashable] = [game.key[s] for game, s in zip(games, batch.situation, strict=True)]
    after: list[Hashable] = [game.key[s] for game, s in zip(games, there, strict=True)]
    turn = batch.steps.step.tolist()
    if name == TURN:  # the situation, which is what decides how an episode goes on
        before, after = [int(s) for s in batch.situation], there
    elif name == NUMBER:
        before = list(zip(turn, before, strict=True))
        after = list(zip([t + 1 for t in turn], after, strict=True))
    elif name == HISTORY:
        before, after = _histories(turn, before, batch.action.tolist(), after)
    steps = batch.steps
    return StepBatch(
        **{what: getattr(steps, what) for what in ("group", "trajectory", "step", "reward", "success")},
        anchor=[str(key) for key in before],
        action=[WORDS[a] for a in batch.action],
        terminated=steps.terminated,
        truncated=steps.truncated,
        tokens=np.ones_like(batch.action),
        extra={"next_anchor": [SOLVED if s == WON else str(key) for s, key in zip(there, after, strict=True)]},
    )


def _histories(
    turn: Sequence[int], before: Sequence[Hashable], action: Sequence[int], after: Sequence[Hashable]
) -> tuple[list[Hashable], list[Hashable]]:
    """Hash of the history before each step, and with it; steps are in the order of their trajectories."""
    histories: list[Hashable] = []
    ahead: list[Hashable] = []
    for t, first, done, then in zip(turn, before, action, after, strict=True):
        histories.append(ahead[-1] if t else hash((first,)))
        ahead.append(hash((histories[-1], done, then)))
    return histories, ahead


def credit(name: str, steps: StepBatch) -> Floats:
    """Advantages by a method, or by REINFORCE++."""
    if name == REINFORCE:
        return reinforce(steps).advantage
    return credit_quality.credit(name, steps)


def measure(world: World, batches: int, seed: int) -> dict[str, Any]:
    """Every method on the same batches, and some of them with other keys of the states."""
    draw = np.random.default_rng(seed)
    tallies: dict[tuple[str, str], Tally] = {}
    advantages: dict[tuple[str, str], list[Floats]] = {}
    shared: dict[str, list[float]] = {key: [] for key in KEYS}
    exact, cells, won = [], [], []
    sizes = (len(world.games), max(len(game.key) for game in world.games), len(WORDS), world.horizon + 1)
    for _ in range(batches):
        batch = world.batch(USUAL_GROUP, EPISODES, draw)
        tables = {key: keyed(world, batch, key) for key in KEYS}
        estimates = {(STATE, name): credit(name, batch.steps) for name in METHODS}  # proxmo compares texts as well
        estimates[STATE, REINFORCE] = credit(REINFORCE, tables[STATE])
        estimates |= {(STATE, VINE_ALL): vine(world, batch, draw), (STATE, EXACT): batch.exact}
        estimates |= {(key, name): credit(name, tables[key]) for key in KEYS[1:] for name in KEYED}
        for place, advantage in estimates.items():
            tallies.setdefault(place, Tally()).add(world, batch, advantage, len(batch.exact))
            advantages.setdefault(place, []).append(advantage)
        for key, steps in tables.items():
            groups = describe_groups("anchor", *joint_codes(steps.group, steps.anchor))
            shared[key].append(groups["credit/share_steps_in_anchor_groups"])
        exact.append(batch.exact)
        cells.append(_cells(batch, sizes))
        won.append(batch.steps.success[batch.left == world.horizon].mean())
    number = np.repeat(np.arange(batches), [len(part) for part in exact])
    same = np.concatenate(exact), np.concatenate(cells), number
    results: dict[str, Any] = {key: {"shared": float(np.mean(shared[key])), "methods": {}} for key in KEYS}
    for (key, name), tally in tallies.items():
        split = with_errors(np.concatenate(advantages[key, name]), *same)
        results[key]["methods"][name] = {**tally.result(), **split}
    return {"success": float(np.mean(won)), "keys": results}


def _cells(batch: Batch, sizes: tuple[int, ...]) -> Ints:
    """A number for each action in each situation with each number of turns left."""
    columns = (batch.game, batch.situation, batch.action, batch.left)
    return np.ravel_multi_index(columns, sizes)


@app.command()
def run(
    models: Annotated[list[str], typer.Argument(help="NAME=FOLDER: of Hugging Face or a checkpoint of verl's")],
    batches: Annotated[int, typer.Option(help="batches of 64 episodes")] = 200,
    every: Annotated[int, typer.Option(help="use one in so many of the different starts")] = EVERY,
    seed: int = 0,
) -> None:
    """Measure, add to the saved results, write the tables."""
    for name, games, prompts in unrolled(models, different(LEVEL, SEEDS)[::every]):
        measured = measure(World.of(games, USUAL_HORIZON, prompts), batches, seed)
        about = {"level": LEVEL, "games": len(games), "batches": batches, "seed": seed, "packages": packages()}
        saved = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
        RESULTS.write_text(json.dumps({**saved, name: {**about, **measured}}, indent=1) + "\n")
    pages()


@app.command()
def pages() -> None:
    """Write the tables from the saved results."""
    results = json.loads(RESULTS.read_text())
    for name, make in CONTENTS.items():
        write_between(PAGE, name, f"{make(results)}\n")


def by_method(results: dict[str, Any]) -> str:
    """Markdown: for each model every method."""
    return "\n\n".join(
        f"**{name}**: {result['games']} starts, {result['batches']} batches, success {result['success']:.2f}, "
        f"{result['keys'][STATE]['shared']:.0%} of the steps share their state, "
        f"{result['keys'][STATE]['methods'][EXACT]['measured']:.0%} can be split\n\n"
        "| method | correlation | wrong sign | variance | bias | cosine of a batch | of all batches |\n"
        "|---|---|---|---|---|---|---|\n"
        + "\n".join(_row(method, tally) for method, tally in result["keys"][STATE]["methods"].items())
        for name, result in results.items()
    )


def by_key(results: dict[str, Any]) -> str:
    """Markdown: for each model some methods under other keys."""
    return "\n\n".join(
        f"| {name}: key of a state | shared | {' | '.join(KEYED)} |\n|---|---{'|---' * len(KEYED)}|\n"
        + "\n".join(
            f"| {key} | {result['keys'][key]['shared']:.0%} | "
            + " | ".join(cosine_cell(result["keys"][key]["methods"][method]) for method in KEYED)
            + " |"
            for key in KEYS
        )
        for name, result in results.items()
    )


CONTENTS: dict[str, Callable[[dict[str, Any]], str]] = {"errors by method": by_method, "cosines by key": by_key}


def _row(name: str, tally: dict[str, float]) -> str:
    cells = [name, f"{tally['correlation']:.2f}", f"{tally['wrong']:.0%}"]
    cells += [_number(tally[what], 2 * tally[f"{what}_error"]) for what in ("variance", "bias")]
    return f"| {' | '.join([*cells, cosine_cell(tally), format(tally['cosine_all'], '.2f')])} |"


def _number(value: float, error: float) -> str:
    return f"{round(value, 1) + 0.0:.1f} ± {error:.1f}"


if __name__ == "__main__":
    app()
