"""When success was there and went, and what else changed about then: plain curves by step in, plain numbers out.

The log's rules (``health.py``) and the comparison of runs (``compare.py``) ask the same questions of different curves.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

RECENT = 3
"""steps whose mean counts as one level of success, at least"""
CHANCE = 0.05
"""share of the runs whose success does not change in which a fall may be reported (Bonferroni over pairs of steps)"""
LEAST = 0.2
"""a best level of success below which nothing can be lost"""
POINTS, TIMES, PEAK = 0.1, 1.5, 3.0
"""what counts: a share that moved by so much, a size that grew or shrank by so much, a peak over the median before"""

Kind = Literal["share", "size", "peak"]
UPDATE: dict[str, tuple[str, float]] = {
    "KL": ("actor/ppo_kl", 0.02),
    "clipped": ("actor/pg_clipfrac", 0.2),
    "norm of the gradient": ("actor/grad_norm", 0.0),
}
"""metrics of an update, of which one alone can undo a policy, and what they are healthy up to (docs/metrics.md)"""


class Curve(NamedTuple):
    """A quantity by step, both (S,). A ``share`` is at most 1; of a ``peak`` single steps matter, above ``least``.

    ``episodes``: of success, how many independent ones a step is worth; infinite: it has no noise.
    """

    step: NDArray[Any]
    value: Numbers
    kind: Kind = "size"
    least: float = 0.0
    episodes: float = np.inf


class Fall(NamedTuple):
    """Success that was lost; a level is the mean of ``width`` steps up to one, at the start of fewer."""

    best: float
    best_at: int
    """step of the best level"""
    last: float
    """level at the end, or the lowest of a fall that was made good"""
    turn: int
    """step at which most was lost"""
    steps: list[int]
    """those below half of the best"""
    within: tuple[int, int]
    """first and last step that tell of the fall"""
    width: int
    back: int | None = None
    """step at which half of the best was there again"""


class Change(NamedTuple):
    """A quantity that changed about a fall, and the step from which on it was different."""

    what: str
    kind: Kind
    before: float
    after: float
    step: int


def fall(success: Curve, validation: Curve | None = None) -> Fall | None:
    """The last time that success was half lost, by more than chance explains and unless validation held meanwhile.

    Levels are means of 3 steps; where these show no fall, of 6, 12, ... steps: with few groups a step, 3 are too noisy.
    """
    curve, width = finite(success), RECENT
    while (drop := _fall(curve, width)) is None:
        if (width := 2 * width) > len(curve.value):
            return None
    return None if validation is not None and _held(finite(validation), drop) else drop


def _fall(curve: Curve, width: int) -> Fall | None:
    """The last level that is below half of an earlier one, by more than noise parts any two levels of the run."""
    step, value, number = curve.step, curve.value, len(curve.value)
    steps = np.minimum(np.arange(number) + 1, width)  # of each level
    level = np.array([value[i - n : i].mean() for i, n in enumerate(steps, 1)])
    sigmas = NormalDist().inv_cdf(1 - CHANCE / max(1, number) ** 2)
    for low in np.flatnonzero(level < np.maximum.accumulate(level) / 2)[::-1]:
        high, n = level[:low], steps[:low]
        p = (n * high + steps[low] * level[low]) / (n + steps[low])  # of both, as if nothing was lost
        noise = np.sqrt(np.maximum(p * (1 - p), 0) * (1 / n + 1 / steps[low]) / curve.episodes)
        half = (high >= LEAST) & (level[low] < high / 2)
        lost = np.where(half, high - level[low] - sigmas * noise, 0.0)
        if lost.max() > 0:
            break
    else:
        return None
    at = int(low) - 1 - int(lost[::-1].argmax())  # of equals the last: only after it something is lost
    below = np.append(level < level[at] / 2, False)
    since, over = low + 1 - int(np.argmin(below[low::-1])), low + int(np.argmin(below[low:]))
    end = min(over, since + width)
    first = max(0, at - width + 1)
    cut = split(value[first:end])
    return Fall(
        float(level[at]),
        int(step[at]),
        float(level[-1] if over == number else level[at:over].min()),
        int(step[first + cut if cut else since]),
        [int(s) for s in step[since:over]],
        (int(step[max(0, at - 2 * width + 1)]), int(step[end - 1])),
        width,
        None if over == number else int(step[over]),
    )


def _held(validation: Curve, drop: Fall) -> bool:
    """Whether validation kept three quarters of its success; one after step s plays the policy of step s + 1."""
    step, value = validation.step + 1, validation.value
    before = value[(step >= drop.within[0]) & (step < drop.turn)]
    during = value[(step >= drop.steps[0]) & (step < (drop.back or np.inf))]
    return len(before) > 0 and len(during) > 0 and bool(during.mean() >= 0.75 * before[-1])


def changes(curves: Mapping[str, Curve], about: Fall) -> list[Change]:
    """What changed while success fell, in the order in which it did."""
    moved = [change for name, curve in curves.items() if (change := _change(name, curve, about))]
    return sorted(moved, key=lambda change: change.step)


def change_rows(about: Fall, moved: list[Change]) -> list[dict[str, Any]]:
    """What changed and, among it, the success, as rows of a table in the order of the steps."""
    rows: list[tuple[str, Kind, float, float, int, bool]] = [
        (change.what, change.kind, change.before, change.after, change.step, False) for change in moved
    ]
    rows.append(("success", "share", about.best, about.last, about.turn, True))
    return [
        {"step": step, "what": what, "before": formatted(before, kind), "after": formatted(after, kind), "fall": falls}
        for what, kind, before, after, step, falls in sorted(rows, key=lambda row: (row[4], not row[5]))
    ]


def formatted(value: float, kind: Kind) -> str:
    if kind != "share":
        return f"{value:.3g}"
    return f"{100 * value:.0f} %" if value >= 0.01 or value == 0 else f"{100 * value:.1f} %"


def finite(curve: Curve) -> Curve:
    """The steps with a number, in order."""
    step, value = np.asarray(curve.step, float), np.asarray(curve.value, float)
    there = np.isfinite(value) & np.isfinite(step)
    order = np.argsort(step[there], kind="stable")
    return curve._replace(step=step[there][order], value=value[there][order])


def split(value: Numbers) -> int:
    """Where a curve is best cut into two levels: the place of the first number of the second, 0 if it has none.

    Least squares; each level has at least two numbers, so that one outlier is none.
    """
    cuts = range(2, len(value) - 1)
    return min(cuts, key=lambda k: _scatter(value, k), default=0)


def _scatter(value: Numbers, k: int) -> float:
    return float(((value[:k] - value[:k].mean()) ** 2).sum() + ((value[k:] - value[k:].mean()) ** 2).sum())


def _change(name: str, curve: Curve, about: Fall) -> Change | None:
    step, value, kind, least, _ = finite(curve)
    within = (step >= about.within[0]) & (step <= about.within[1])
    if kind == "peak":
        return _peak(name, step, abs(value), within, least)
    step, value = step[within], value[within]
    if not (k := split(value)):
        return None
    before, after = float(value[:k].mean()), float(value[k:].mean())
    noise = (_scatter(value, k) / len(value)) ** 0.5
    if abs(after - before) <= 2 * noise or not _large(before, after, kind):
        return None
    return Change(name, kind, before, after, int(step[k]))


def _large(before: float, after: float, kind: Kind) -> bool:
    if kind == "share":
        return abs(after - before) >= POINTS
    low, high = sorted((abs(before), abs(after)))
    return high >= TIMES * low and high > 0


def _peak(name: str, step: Numbers, value: Numbers, within: NDArray[np.bool_], least: float) -> Change | None:
    """The largest value while success fell, where it is far above what was usual until then."""
    if not within.any():
        return None
    at = int(np.flatnonzero(within)[value[within].argmax()])
    early = at < RECENT  # nothing was usual yet: only what is far above the healthy counts, and what came later
    if early and (least == 0 or len(value) <= RECENT):
        return None
    usual = float(np.median(np.delete(value, at) if early else value[:at]))
    least *= PEAK if early else 1
    return (
        Change(name, "peak", usual, float(value[at]), int(step[at])) if value[at] > max(least, PEAK * usual) else None
    )
