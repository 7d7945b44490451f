"""What the samples of an evaluation say, with 95 % intervals: as JSON, and as a table for a terminal.

Samples that failed in all attempts are in no number but ``failed``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
    asked: int,
) -> dict[str, Any]:
    """The numbers of an evaluation.

    Args:
        samples: place of a task -> its finished samples.
        failures: samples that failed, with their ``task`` and ``reason``.
        tasks: what each task is (``env_id``, ``seed``, ``kwargs``).
        asked: samples per task that were asked for.

    Returns:
        ``success`` and ``pass_at`` with intervals over tasks, means of what else a sample has, ``failed`` with reasons,
        ``complete`` and ``tasks``, what each of them came to.
    """
    played = {task: each for task, each in samples.items() if each}
    solved = [sum(sample["success"] for sample in each) for each in played.values()]
    numbers = [len(each) for each in played.values()]
    total = len(tasks) * asked
    missing = total - sum(numbers) - len(failures)
    parts = _components(next(iter(played.values()), [{}])[0])
    return {
        "complete": missing == 0 and len(failures) <= MOST_FAILED * total,
        "samples": sum(numbers),
        "samples_per_task": asked,
        "success": _interval(stats.success(solved, numbers)) if played else None,
        "pass_at": {str(k): found for k in powers(asked) if (found := _pass_at(solved, numbers, k))},
        **{name: _mean([[sample[name] for sample in each] for each in played.values()]) for name in (*MEANS, *parts)},
        "failed": {
            "samples": len(failures),
            "share": len(failures) / total,
            "kinds": dict(Counter(failure_kind(each["reason"]) for each in failures)),
            "reasons": list(dict.fromkeys(" ".join(each["reason"].split())[:500] for each in failures))[:20],
        },
        "tasks": [
            {**task, "samples": len(samples.get(i, ())), "solved": sum(s["success"] for s in samples.get(i, ()))}
            for i, task in enumerate(tasks)
        ],
    }


def _components(found: Mapping[str, Any]) -> list[str]:
    return [name for name in found if name.startswith(COMPONENT)]


def powers(n: int) -> list[int]:
    """1, 2, 4, ... up to ``n``, and ``n``."""
    return sorted({*(2**i for i in range(n.bit_length())), n})


def _pass_at(solved: Sequence[int], numbers: Sequence[int], k: int) -> dict[str, Any] | None:
    """pass@k over the tasks that have k finished samples; None where there is no such task."""
    held = [(c, n) for c, n in zip(solved, numbers, strict=True) if n >= k]
    if not held:
        return None
    solved_of, samples_of = zip(*held, strict=True)
    found = stats.bootstrap(stats.pass_at_k(solved_of, samples_of, k))
    return {**_interval(found), "tasks": len(held)}


def _mean(values: Sequence[Sequence[float]]) -> dict[str, float] | None:
    return _interval(stats.bootstrap([float(np.mean(each)) for each in values])) if values else None


def _interval(found: stats.Interval) -> dict[str, float]:
    return {name: float(value) for name, value in found._asdict().items()}


def rows(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The lines of a table: what, its value, its interval."""
    shown = [("success", found["success"], True)]
    shown += [(f"pass@{k}", each, True) for k, each in found["pass_at"].items() if k != "1"]
    shown += [(words, found[name], name in SHARES) for name, words in MEANS.items()]
    if len(parts := _components(found)) > 1:
        shown += [(f"composed return: {name.removeprefix(COMPONENT)}", found[name], False) for name in parts]
    return [(what, *_shown(each, share)) for what, each, share in shown if each is not None]


def remarks(found: Mapping[str, Any]) -> list[str]:
    """What to know when reading the numbers."""
    said, failed = [], found["failed"]
    if len(found["tasks"]) < FEW_TASKS:
        said.append(f"{len(found['tasks'])} tasks: below {FEW_TASKS} intervals over tasks are too narrow")
    if failed["samples"]:
        said.append(f"{failed['samples']} samples failed and are left out ({100 * failed['share']:.1f} %):")
        said += [f"  {reason}" for reason in failed["reasons"][:5]]
    if not found["complete"]:
        said.append("INCOMPLETE: the same command goes on with what is missing")
    return said


def _shown(each: Mapping[str, float], share: bool) -> tuple[str, str]:
    value, low, high = ((f"{100 * each[k]:.1f} %" if share else f"{each[k]:.3g}") for k in ("value", "low", "high"))
    return value, f"{low} to {high}"
