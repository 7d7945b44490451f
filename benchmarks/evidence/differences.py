"""Methods compared with baselines: paired differences over seeds, and their p-values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product

import numpy as np
from lines import Line, validations
from studies import BASELINES, BY_STEPS, height

Values = Mapping[tuple[str, str], Mapping[int, float]]
"""a measure of the reported runs, by task and method, then by seed"""
TASK_FEWEST = 3
"""fewest seeds of a task for a difference"""
BEYOND_CHANCE = 0.05


def final(line: Line) -> float:
    """Success after the last step."""
    return validations(line)[1][-1]


MEASURES: dict[str, Callable[[Line], float]] = {"area": height, "success after the last step": final}


def values(reported: Sequence[Line], measure: Callable[[Line], float]) -> Values:
    """The measure of each line."""
    by_method: dict[tuple[str, str], dict[int, float]] = {}
    for line in reported:
        by_method.setdefault((line["task"], line["variant"]), {})[line["seed"]] = measure(line)
    return by_method


def paired(of: Values, task: str, method: str, baseline: str) -> list[float]:
    """Differences over the seeds that both have; none if these are too few."""
    ours, theirs = of.get((task, method), {}), of.get((task, baseline), {})
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours) if seed in theirs]
    return differences if len(differences) >= TASK_FEWEST else []


def over_tasks(of: Values, tasks: Sequence[str], method: str, baseline: str) -> list[float]:
    """Paired differences of all tasks, scaled so that their sum is the mean over tasks of the tasks' means."""
    by_task = [paired(of, task, method, baseline) for task in tasks]
    if not all(by_task):
        return []
    return [difference / len(differences) / len(by_task) for differences in by_task for difference in differences]


def sign_flip(differences: Sequence[float]) -> float:
    """Two-sided p of the sum of N paired differences: the share of the 2^N choices of signs with as large a sum.

    Exact, if without an effect a difference is as likely as its negative.
    """
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums + difference, sums - difference])
    return float(np.mean(np.abs(sums) >= abs(sums[0]) - 1e-12))


def holm(chances: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
    """p of each comparison after Holm's correction."""
    corrected, least = {}, 0.0
    for place, (pair, p) in enumerate(sorted(chances.items(), key=lambda entry: entry[1])):
        least = max(least, min(1.0, p * (len(chances) - place)))
        corrected[pair] = least
    return corrected


def of_task(
    of: Values, task: str, methods: Sequence[str] = BY_STEPS, baselines: Sequence[str] = BASELINES
) -> Iterator[list[str]]:
    """A row per method, a cell per baseline: mean, p, seeds in which the method is ahead."""
    for method in methods:
        row = [method]
        for d in (paired(of, task, method, baseline) for baseline in baselines):
            ahead = sum(difference > 0 for difference in d)
            row.append(f"{np.mean(d):+.3f} ({chance(sign_flip(d))}, {ahead} of {len(d)})" if d else "-")
        yield row


def of_all(
    of: Values, tasks: Sequence[str], methods: Sequence[str] = BY_STEPS, baselines: Sequence[str] = BASELINES
) -> Iterator[list[str]]:
    """The same over all tasks, with p also after Holm's correction for all of these cells."""
    differences = {pair: over_tasks(of, tasks, *pair) for pair in product(methods, baselines)}
    corrected = holm({pair: sign_flip(d) for pair, d in differences.items() if d})
    for method in methods:
        row = [method]
        for baseline in baselines:
            d, p = differences[method, baseline], corrected.get((method, baseline))
            cell = "-" if p is None else f"{sum(d):+.3f} ({chance(sign_flip(d))}, corrected {chance(p)})"
            row.append(f"**{cell}**" if p is not None and p < BEYOND_CHANCE else cell)
        yield row


def chance(p: float) -> str:
    """p with three digits, never 0."""
    return f"p {p:.3f}" if p >= 0.0005 else "p < 0.001"
