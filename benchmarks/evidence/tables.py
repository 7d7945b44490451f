"""The tables of benchmarks/results/README.md that are made from the lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import differences
import lines
import numpy as np
from differences import sign_flip
from lines import Line
from studies import (
    BASELINES,
    BRANCHING,
    BY_STEPS,
    CRITIC,
    CRITIC_PEERS,
    METHODS,
    OURS,
    OURS_PEERS,
    POLICY,
    PPO,
    SEEDS,
    STRATEGIES,
    Grid,
    Variant,
    best_rate,
    tuned,
)
from tasks import TASKS

from verl_turnkey.plugins.cli.tables import write_between
from verl_turnkey.plugins.view import stats
from verl_turnkey.plugins.view.compare import FEWEST, GROUP_SIZE, TRAINING, Table, compare, markdown
from verl_turnkey.plugins.view.compare import draw as draw_panels
from verl_turnkey.plugins.view.runs import RunMetrics

PAGE = Path(__file__).parents[1] / "results" / "README.md"
PICTURE = Path(__file__).parents[2] / "docs" / "evidence.png"
SHARE_OF_BEST = 0.8
UNFORKED = ("grpo_steps", "gigpo")
"""on independent episodes; the first is the credit of trees without forks"""
DRAWN = ("grpo_steps", "rloo_steps", "turn_gae", "gigpo", "hgpo", "graph")
COSTS = ("tokens in a step", "turns in a step")


def write() -> None:
    """Write every table between its markers on the page, and draw the picture."""
    for name, make in CONTENTS.items():
        write_between(PAGE, name, f"{make()}\n")
    draw()


def draw() -> None:
    """Validation curves of the reported seeds, a panel per task."""
    kept, panels = lines.load("methods"), []
    for task in TASKS:
        own = _of(kept, task)
        chosen, _ = _chosen(task, own, DRAWN)
        if len({line["variant"] for line in chosen}) > 1:
            panel = compare([_as_run(line) for line in chosen], metric="val success", by=["method"])
            panels.append({**panel, "metric": f"{task}: success in validation"})
    draw_panels(panels, PICTURE)


def by_task(study: str, kept: Sequence[Line] | None, make: Callable[[str, Sequence[Line]], Iterable[str]]) -> str:
    """What ``make`` returns for the lines of each task; ``kept``: by default those of the repository."""
    kept = lines.load(study) if kept is None else kept
    parts = []
    for task in TASKS:
        if own := _of(kept, task):
            parts += [f"**{task}**", *make(task, own)]
    return "\n\n".join(part for part in parts if part) or "(No run has finished.)"


# --- methods ----------------------------------------------------------------------------------------------------------


def methods(kept: Sequence[Line] | None = None) -> str:
    """For each task: the seeds with the chosen rates, then the learning rates tried."""
    return _compared(METHODS, "grpo_steps", kept)


def strategies(kept: Sequence[Line] | None = None) -> str:
    """The same for forking rollouts, with the cost of their steps."""
    return _compared((*UNFORKED, *STRATEGIES), UNFORKED[0], kept, costs=True)


def _compared(names: Sequence[str], baseline: str, kept: Sequence[Line] | None, costs: bool = False) -> str:
    def of(task: str, own: Sequence[Line]) -> tuple[str, str]:
        mine = [line for line in own if line["variant"] in names]
        return _reported(task, mine, names, baseline, costs), _tuning(task, mine, names)

    kept = lines.load("methods") if kept is None else kept
    if costs:
        forked = {line["task"] for line in kept if line["variant"] in STRATEGIES}
        kept = [line for line in kept if line["task"] in forked]
    return by_task("methods", kept, of)


def _tuning(task: str, own: Sequence[Line], names: Sequence[str], grid: Grid = POLICY, of: str = "") -> str:
    rows = []
    for name in names:
        areas = tuned(own, task, name, grid)
        if areas:
            best = best_rate(own, task, name, grid)
            cells = [_bold(f"{areas[lr]:.3f}", lr == best) if lr in areas else "-" for lr in grid.rates]
            rows.append([name, *cells])
    seeds = ", ".join(map(str, SEEDS[task].tuning))
    caption = (
        f"Mean area under the validation curve by learning rate{of}, on the seeds {seeds}, none of which is reported:"
    )
    missing = "None has been tried on all of them yet."
    return f"{caption}\n\n{_table(['method', *(f'{lr:g}' for lr in grid.rates)], rows) if rows else missing}"


def against(kept: Sequence[Line] | None = None) -> str:
    """Each method that compares steps against each baseline: by task, and over all tasks."""
    kept = lines.load("methods") if kept is None else kept
    reported = [line for task in TASKS for line in _chosen(task, _of(kept, task), METHODS)[0]]
    return _differences(reported, BY_STEPS, BASELINES)


def _differences(reported: Sequence[Line], names: Sequence[str], baselines: Sequence[str]) -> str:
    tasks = [task for task in TASKS if any(line["task"] == task for line in reported)]
    parts = []
    for what, measure in differences.MEASURES.items():
        of = differences.values(reported, measure)
        tables = {task: differences.of_task(of, task, names, baselines) for task in tasks}
        tables["all tasks"] = differences.of_all(of, tasks, names, baselines)
        parts += [_table([f"{where}: {what} less that of", *baselines], [*rows]) for where, rows in tables.items()]
    return "\n\n".join(parts)


def critic(kept: Sequence[Line] | None = None) -> str:
    """For each task: PPO by the rate of its critic and, if another rate is best, the reported seeds with it."""

    def of(task: str, own: Sequence[Line]) -> tuple[str, str]:
        ppo = [line for line in own if line["variant"] == PPO]
        rate = best_rate(ppo, task, PPO, CRITIC)
        seeds = SEEDS[task].reported
        chosen = [line for line in own if line["seed"] in seeds and line.get("critic_lr", rate) == rate]
        grid = _tuning(task, ppo, (PPO,), CRITIC, " of the critic")
        return grid, _method_table(task, chosen, (PPO, *CRITIC_PEERS), PPO) if chosen else ""

    return by_task("critic", kept, of)


def ours(kept: Sequence[Line] | None = None) -> str:
    """``loo_td`` by learning rate and beside its peers, by task; then its differences from them."""
    kept, reported = lines.load("loo_td") if kept is None else kept, []

    def of(task: str, own: Sequence[Line]) -> tuple[str, str]:
        tuning = [line for line in own if line["variant"] == OURS]
        rate, seeds = best_rate(tuning, task, OURS), SEEDS[task].reported
        chosen = [
            line for line in own if line["seed"] in seeds and (line["variant"] in OURS_PEERS or line["lr"] == rate)
        ]
        reported.extend(chosen)
        grid = _tuning(task, tuning, (OURS,))
        return grid, _method_table(task, chosen, (OURS, *OURS_PEERS), "gigpo") if chosen else ""

    return "\n\n".join([by_task("loo_td", kept, of), _differences(reported, (OURS,), OURS_PEERS)])


def _of(kept: Sequence[Line], task: str) -> list[Line]:
    return [line for line in kept if line["task"] == task]


def _chosen(task: str, own: Sequence[Line], names: Sequence[str]) -> tuple[list[Line], dict[str, float | None]]:
    """The reported lines, by name and seed, and the chosen rates."""
    seeds, rates = SEEDS[task].reported, {name: best_rate(own, task, name) for name in names}
    chosen = [line for line in own if line["seed"] in seeds and line["lr"] == rates.get(line["variant"])]
    return sorted(chosen, key=lambda line: (names.index(line["variant"]), line["seed"])), rates


def _reported(task: str, own: Sequence[Line], names: Sequence[str], baseline: str, costs: bool) -> str:
    order, _ = _chosen(task, own, names)
    return _method_table(task, order, names, baseline, costs) if order else ""


def _method_table(task: str, own: Sequence[Line], names: Sequence[str], baseline: str, costs: bool = False) -> str:
    """A row per method; ``own``: its lines, all with one rate."""
    check(own)
    order = sorted(own, key=lambda line: (names.index(line["variant"]), line["seed"]))
    rates = {line["variant"]: line["lr"] for line in order}
    runs = [_as_run(line) for line in order]
    by_name = _by_name(runs, order)
    highest = max(group["final"]["interquartile_mean"] for group in _groups(runs))
    level = round(SHARE_OF_BEST * highest, 2)
    groups = _groups(runs, level)
    base = next((group for group in groups if group["name"] == baseline), None)
    rows = [
        [
            group["name"],
            f"{rates[group['name']]:g}",
            str(len(group["runs"])),
            *(_costs(by_name[group["name"]]) if costs else (_played(by_name[group["name"]]),)),
            *(cell for what in ("final", "area") for cell in _iqm(group[what])),
            *(("-", "-") if base in (None, group) else _against(group, base)),
            group["to_level"]["interactions"]["said"],
            str(sum(run["collapse"] is not None for run in group["runs"]) or "-"),
        ]
        for group in groups
    ]
    head = [
        "method", "rate", "seeds", *(COSTS if costs else ("turns",)), f"success at step {order[0]['steps'][-1]}, IQM",
        "95 % of it", "area, IQM", "95 % of it", f"area less that of {baseline}", "better than it",
        f"interactions to {level:g}", "collapsed",
    ]  # fmt: skip
    return _table(head, rows)


def _costs(runs: Iterable[RunMetrics]) -> Iterable[str]:
    """Tokens and turns of a step, branches included."""
    costs = [(_last(run.tokens()) / run.step[-1], _last(run.interactions()) / run.step[-1]) for run in runs]
    return (f"{cost:.0f}" for cost in np.mean(costs, axis=0))


def _played(runs: Iterable[RunMetrics]) -> str:
    """Turns of a whole run in training."""
    return f"{np.mean([_last(run.interactions()) for run in runs]):.0f}"


def _as_run(line: Line) -> RunMetrics:
    overrides = dict(override.split("=", 1) for override in line["overrides"])
    config = {"algorithm.adv_estimator": line["variant"], "data.seed": line["seed"]}
    return lines.as_run(line, config | {GROUP_SIZE: int(overrides.get(GROUP_SIZE, Variant.rollouts))})


def _by_name(runs: Sequence[RunMetrics], own: Sequence[Line]) -> dict[str, list[RunMetrics]]:
    by_name: dict[str, list[RunMetrics]] = {}
    for run, line in zip(runs, own, strict=True):
        by_name.setdefault(line["variant"], []).append(run)
    return by_name


def _groups(runs: Sequence[RunMetrics], level: float | None = None) -> list[dict[str, Any]]:
    return compare(runs, metric="val success", by=["method"], level=level)["groups"]


def _iqm(spread: Mapping[str, Any]) -> tuple[str, str]:
    """Interquartile mean over seeds and its bootstrap interval."""
    ends = spread["interval"]
    return f"{spread['interquartile_mean']:.3f}", f"{ends[0]:.3f} to {ends[1]:.3f}" if ends else "-"


def _against(group: Mapping[str, Any], base: Mapping[str, Any]) -> tuple[str, str]:
    """Mean difference of the areas over the seeds that both have, with its p, and the probability of improvement."""
    ours, theirs = (dict(zip((run["seed"] for run in side["runs"]), side["area"]["of_runs"], strict=True))
                    for side in (group, base))  # fmt: skip
    differences = [ours[seed] - theirs[seed] for seed in ours if seed in theirs]
    if len(differences) < FEWEST:
        return "-", "-"
    better = stats.improvement(group["area"]["of_runs"], base["area"]["of_runs"]).value
    return f"{np.mean(differences):+.3f} (p {sign_flip(differences):.3f})", f"{better:.2f}"


def check(compared: Sequence[Line]) -> None:
    """Runs of a task must have the same steps, and those of a seed must have started from the same model.

    Raises:
        ValueError: they have not.
    """
    for what, keys in (("warm_start", ("task", "seed")), ("steps", ("task",))):
        distinct: dict[tuple, set[str]] = {}
        for line in compared:
            steps = lines.validations(line)[0] if what == "steps" else line[what]
            distinct.setdefault(tuple(line[key] for key in keys), set()).add(str(steps))
        for key, values in distinct.items():
            if len(values) > 1:
                where = " ".join(map(str, key))
                raise ValueError(f"runs of {where} differ in {what}: {', '.join(sorted(values))}")


# --- branching --------------------------------------------------------------------------------------------------------


def branching(kept: Sequence[Line] | None = None) -> str:
    """For each task: every variant at about equal tokens."""
    return by_task("branching", kept, lambda _, own: (_branching(own),))


def _branching(own: Sequence[Line]) -> str:
    check(own)
    order = sorted(own, key=lambda line: (list(BRANCHING).index(line["variant"]), line["seed"]))
    runs = [_as_run(line) for line in order]
    rows, by_name = [], _by_name(runs, order)
    for group in _groups(runs):
        mine = by_name[group["name"]]
        final, area = group["final"], group["area"]
        rows.append(
            [
                group["name"],
                str(len(mine)),
                *_costs(mine),
                f"{final['mean']:.3f}",
                f"{final['lowest']:.3f} to {final['highest']:.3f}",
                f"{area['mean']:.3f}",
                f"{np.mean([np.nanmean(run.metrics[TRAINING]) for run in mine]):.3f}",
            ]
        )
    head = [
        "rollouts", "seeds", *COSTS, f"success at step {order[0]['steps'][-1]}",
        "lowest to highest", "mean of the validations", "of the training episodes",
    ]  # fmt: skip
    return _table(head, rows)


def _last(values: Any) -> float:
    return float(values[-1])


# --- markdown ---------------------------------------------------------------------------------------------------------


def _table(head: list[str], rows: list[list[str]]) -> str:
    return markdown(Table("", head, rows)).rstrip("\n")


def _bold(text: str, chosen: bool) -> str:
    return f"**{text}**" if chosen else text


CONTENTS: dict[str, Callable[[], str]] = {
    "methods by task": methods,
    "methods against baselines": against,
    "critics by task": critic,
    "loo_td by task": ours,
    "strategies by task": strategies,
    "branching by task": branching,
}
