"""The tables of docs/benchmarks.md that are made from kept lines."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lines
import numpy as np
from lines import Line
from studies import BRANCHING, METHODS, RATES, TUNING_SEED, best_rate, tuned
from tasks import TASKS

from verl_turnkey.plugins.seeing import stats
from verl_turnkey.plugins.seeing.compare import compare

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
MARKS = "<!-- {name}: written by benchmarks/evidence/run.py pages -->\n{content}\n<!-- /{name} -->"
BASELINE = "grpo_steps"
SHARE_OF_BEST = 0.8


def write() -> None:
    """Put every table between its marks on the page."""
    text = PAGE.read_text(encoding="utf-8")
    for name, make in CONTENTS.items():
        marked = re.compile(re.escape(MARKS).replace(r"\{name\}", name).replace(r"\{content\}", "(.*?)"), re.DOTALL)
        if not marked.search(text):
            raise LookupError(f"{PAGE} has no marks for {name!r}")
        whole = MARKS.format(name=name, content=make())
        text = marked.sub(lambda _, whole=whole: whole, text)
    PAGE.write_text(text, encoding="utf-8")


# --- methods ----------------------------------------------------------------------------------------------------------


def methods(kept: Sequence[Line] | None = None) -> str:
    """For each task: the seeds with the chosen rates, then the learning rates tried."""
    kept = lines.load("methods") if kept is None else kept
    parts = []
    for task in TASKS:
        own = [line for line in kept if line["task"] == task]
        if own:
            parts += [f"**{task}**", _reported(task, own), _tuning(task, own)]
    return "\n\n".join(part for part in parts if part)


def _tuning(task: str, own: Sequence[Line]) -> str:
    rows = []
    for name in METHODS:
        areas = tuned(own, task, name)
        if areas:
            best = best_rate(own, task, name)
            cells = [_bold(f"{areas[lr]:.3f}", lr == best) if lr in areas else "-" for lr in RATES]
            rows.append([name, *cells])
    said = f"Area under the validation curve by learning rate, on seed {TUNING_SEED}, which is not among the above:"
    return f"{said}\n\n{_table(['method', *(f'{lr:g}' for lr in RATES)], rows)}" if rows else ""


def _reported(task: str, own: Sequence[Line]) -> str:
    reported = [
        line for line in own if line["seed"] != TUNING_SEED and line["lr"] == best_rate(own, task, line["variant"])
    ]
    if not reported:
        return ""
    check(reported)
    order = sorted(reported, key=lambda line: (list(METHODS).index(line["variant"]), line["seed"]))
    runs = [
        lines.as_run(line, {"algorithm.adv_estimator": line["variant"], "data.seed": line["seed"]}) for line in order
    ]
    rates = {line["variant"]: line["lr"] for line in reported}
    best = max(group["final"]["mean"] for group in compare(runs, metric="val success", by=["method"])["groups"])
    level = round(SHARE_OF_BEST * best, 2)
    found = compare(runs, metric="val success", by=["method"], level=level)
    base = next((group for group in found["groups"] if group["name"] == BASELINE), None)
    rows = []
    for group in found["groups"]:
        better = "-"
        if base and group is not base and len(group["runs"]) > 1 and len(base["runs"]) > 1:
            chance = stats.improvement(group["area"]["of_runs"], base["area"]["of_runs"])
            better = f"{chance.value:.2f} ({chance.low:.2f} to {chance.high:.2f})"
        fallen = sum(run["collapse"] is not None for run in group["runs"])
        reached = group["to_level"]["interactions"]["said"]
        rows.append(
            [
                group["name"],
                f"{rates[group['name']]:g}",
                str(len(group["runs"])),
                f"{group['final']['mean']:.3f}",
                _interval(group["final"]["interval"]),
                f"{group['area']['interquartile_mean']:.3f}",
                _interval(group["area"]["interval"]),
                better,
                reached,
                str(fallen) if fallen else "-",
            ]
        )
    head = [
        "method", "rate", "seeds", f"success at step {found['range'][1]:g}", "95 % interval", "area, IQM",
        "95 % interval", f"better than {BASELINE} by area", f"interactions to {level:g}", "collapsed",
    ]  # fmt: skip
    return _table(head, rows)


def check(reported: Sequence[Line]) -> None:
    """All runs of a seed must have started from the same model.

    Raises:
        ValueError: they have not.
    """
    started: dict[tuple[str, int], set[str]] = {}
    for line in reported:
        started.setdefault((line["task"], line["seed"]), set()).add(line["warm_start"])
    for (task, seed), models in started.items():
        if len(models) > 1:
            raise ValueError(f"the runs of {task} with seed {seed} started from {len(models)} different models")


# --- branching --------------------------------------------------------------------------------------------------------


def branching(kept: Sequence[Line] | None = None) -> str:
    """For each task: every variant at about equal tokens."""
    kept = lines.load("branching") if kept is None else kept
    parts = []
    for task in TASKS:
        own = [line for line in kept if line["task"] == task]
        if own:
            parts += [f"**{task}**", _branching(own)]
    return "\n\n".join(parts)


def _branching(own: Sequence[Line]) -> str:
    check(own)
    order = sorted(own, key=lambda line: (list(BRANCHING).index(line["variant"]), line["seed"]))
    runs = [
        lines.as_run(line, {"algorithm.adv_estimator": line["variant"], "data.seed": line["seed"]}) for line in order
    ]
    found = compare(runs, metric="val success", by=["method"])
    rows = []
    for group in found["groups"]:
        mine = [run for run, line in zip(runs, order, strict=True) if line["variant"] == group["name"]]
        costs = [(_last(run.tokens()) / run.step[-1], _last(run.interactions()) / run.step[-1]) for run in mine]
        tokens, turns = np.mean(costs, axis=0)
        trained = [float(np.nanmean(run.metrics["episode/success_rate"][-2:])) for run in mine]
        rows.append(
            [
                group["name"],
                str(len(mine)),
                f"{tokens:.0f}",
                f"{turns:.0f}",
                f"{group['final']['mean']:.3f}",
                f"{group['final']['lowest']:.3f} to {group['final']['highest']:.3f}",
                f"{np.mean(trained):.3f}",
            ]
        )
    head = [
        "rollouts", "seeds", "tokens in a step", "turns in a step", f"success at step {found['range'][1]:g}",
        "lowest to highest", "of training episodes, last two steps",
    ]  # fmt: skip
    return _table(head, rows)


def _last(values: Any) -> float:
    return float(values[-1])


# --- markdown ---------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    text = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([text[0], "|---" * len(head) + "|", *text[1:]])


def _interval(ends: Sequence[float] | None) -> str:
    return f"{ends[0]:.3f} to {ends[1]:.3f}" if ends and all(map(math.isfinite, ends)) else "-"


def _bold(text: str, chosen: bool) -> str:
    return f"**{text}**" if chosen else text


CONTENTS: dict[str, Callable[[], str]] = {"methods by task": methods, "branching by task": branching}
