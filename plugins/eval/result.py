"""The result of an evaluation, with 95 % intervals: as JSON, and as a table for a terminal.

Samples that failed in all attempts count in ``failed`` alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from verl_turnkey.plugins.log.schema import COMPONENT
from verl_turnkey.plugins.notices import failure_kind
from verl_turnkey.plugins.view import stats

MOST_FAILED = 0.01
"""share of failed samples above which a result is incomplete"""
FEW_TASKS = 20
MEANS = {
    "env_return": "env return",
    "composed_return": "composed return",
    "turns": "turns",
    "truncated": "truncated",
    "invalid_rate": "invalid actions",
    "unparsed_rate": "unparsed responses",
    "tokens": "tokens written",
}
SHARES = ("truncated", "invalid_rate", "unparsed_rate")


def result(
    samples: Mapping[int, Sequence[Mapping[str, Any]]],
    failures: Sequence[Mapping[str, Any]],
    *,
    tasks: Sequence[Mapping[str, Any]],
    samples_per_task: int,
) -> dict[str, Any]:
    """The numbers of an evaluation.

    Args:
        samples: place of a task -> its finished samples.
        failures: samples that failed, with their ``task`` and ``reason``.
        tasks: what each task is (``env_id``, ``seed``, ``kwargs``).
        samples_per_task: requested samples of each task, finished or not.

    Returns:
        ``success`` and ``pass_at`` with intervals over tasks, means of the other numbers of a sample, ``failed`` with
        reasons, ``complete``, and ``tasks``: each task with its numbers of finished and of solved samples.
    """
    played = [finished for finished in samples.values() if finished]
    solved = [sum(sample["success"] for sample in finished) for finished in played]
    numbers = [len(finished) for finished in played]
    total = len(tasks) * samples_per_task
    missing = total - sum(numbers) - len(failures)
    parts = _components(played[0][0] if played else {})
    return {
        "complete": missing == 0 and len(failures) <= MOST_FAILED * total,
        "samples": sum(numbers),
        "samples_per_task": samples_per_task,
        "success": _interval(stats.success(solved, numbers)) if played else None,
        "pass_at": {str(k): score for k in powers(samples_per_task) if (score := _pass_at(solved, numbers, k))},
        **{name: _mean([[sample[name] for sample in finished] for finished in played]) for name in (*MEANS, *parts)},
        "failed": {
            "samples": len(failures),
            "share": len(failures) / total,
            "kinds": dict(Counter(failure_kind(failure["reason"]) for failure in failures)),
            "reasons": list(dict.fromkeys(" ".join(failure["reason"].split())[:500] for failure in failures))[:20],
        },
        "tasks": [
            {**task, "samples": len(samples.get(i, ())), "solved": sum(s["success"] for s in samples.get(i, ()))}
            for i, task in enumerate(tasks)
        ],
    }


def _components(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(COMPONENT)]


def powers(n: int) -> list[int]:
    """1, 2, 4, ... up to ``n``, and ``n`` itself."""
    return sorted({*(2**i for i in range(n.bit_length())), n})


def _pass_at(solved: Sequence[int], numbers: Sequence[int], k: int) -> dict[str, Any] | None:
    """pass@k over the tasks with at least k finished samples; None without such a task."""
    counts = [(c, n) for c, n in zip(solved, numbers, strict=True) if n >= k]
    if not counts:
        return None
    interval = stats.bootstrap(stats.pass_at_k(*zip(*counts, strict=True), k))
    return {**_interval(interval), "tasks": len(counts)}


def _mean(values: Sequence[Sequence[float]]) -> dict[str, float] | None:
    return _interval(stats.bootstrap([float(np.mean(of_task)) for of_task in values])) if values else None


def _interval(interval: stats.Interval) -> dict[str, float]:
    return {name: float(value) for name, value in interval._asdict().items()}


def rows(numbers: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The lines of a table: quantity, value, interval. ``numbers``: of :func:`result`."""
    lines = [("success", numbers["success"], True)]
    lines += [(f"pass@{k}", score, True) for k, score in numbers["pass_at"].items() if k != "1"]
    lines += [(words, numbers[name], name in SHARES) for name, words in MEANS.items()]
    if len(parts := _components(numbers)) > 1:
        lines += [(f"composed return: {name.removeprefix(COMPONENT)}", numbers[name], False) for name in parts]
    return [(what, *_cells(interval, share)) for what, interval, share in lines if interval is not None]


def remarks(numbers: Mapping[str, Any]) -> list[str]:
    """Warnings about the numbers of :func:`result`."""
    lines, failed = [], numbers["failed"]
    if len(numbers["tasks"]) < FEW_TASKS:
        lines.append(f"{len(numbers['tasks'])} tasks: below {FEW_TASKS} intervals over tasks are too narrow")
    if failed["samples"]:
        lines.append(f"{failed['samples']} samples failed and are left out ({100 * failed['share']:.1f} %):")
        lines += [f"  {reason}" for reason in failed["reasons"][:5]]
    if not numbers["complete"]:
        lines.append("INCOMPLETE: run the same command again to play the missing samples")
    return lines


def _cells(interval: Mapping[str, float], share: bool) -> tuple[str, str]:
    ends = (interval[key] for key in ("value", "low", "high"))
    value, low, high = (f"{100 * end:.1f} %" if share else f"{end:.3g}" for end in ends)
    return value, f"{low} to {high}"
