"""When success was there and went, and what else changed about then: plain curves by step in, plain numbers out.

The log's rules (``health.py``) and the comparison of runs (``compare.py``) ask the same questions of different curves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

RECENT = 3
"""steps whose mean counts as one level of success"""
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
    """A quantity by step, both (S,). A ``share`` is at most 1; of a ``peak`` single steps matter, above ``least``."""

    step: NDArray[Any]
    value: Numbers
    kind: Kind = "size"
    least: float = 0.0


class Fall(NamedTuple):
    """``best``: the highest level, of the steps up to ``best_at``; ``last``: the level at the end, or the lowest of a
    fall that was made good; ``turn``: the step at which most was lost; ``steps``: those below half of the best;
    ``within``: first and last step that tell of it; ``back``: the step at which half of the best was there again."""

    best: float
    best_at: int
    last: float
    turn: int
    steps: list[int]
    within: tuple[int, int]
    back: int | None = None


class Change(NamedTuple):
    """A quantity that changed about a fall, and the step from which on it was different."""

    what: str
    kind: Kind
    before: float
    after: float
    step: int


def fall(success: Curve) -> Fall | None:
    """Whether the level of success was at least 20 % once, and then below half of its best; of several the last."""
    step, value, *_ = finite(success)
    if not len(value):
        return None
    level = np.array([value[max(0, i - RECENT + 1) : i + 1].mean() for i in range(len(value))])
    highest = np.maximum.accumulate(level)
    lost = (level < highest / 2) & (highest >= LEAST)
    if not lost.any():
        return None
    over = len(lost) - int(np.argmax(lost[::-1]))  # the place after the fall
    back = int(step[over]) if over < len(step) else None
    level = level[:over]
    at = len(level) - 1 - int(level[::-1].argmax())  # of equals the last: only after it something is lost
    best = float(level[at])
    below = level < best / 2
    since = len(below) - int(np.argmin(below[::-1]))
    end = min(over, since + RECENT)
    falling = slice(max(0, at - RECENT + 1), end)
    turn = falling.start + split(value[falling]) if split(value[falling]) else since
    return Fall(
        best,
        int(step[at]),
        float(level[-1] if back is None else level[at:].min()),
        int(step[turn]),
        [int(s) for s in step[since:over]],
        (int(step[max(0, at - 2 * RECENT + 1)]), int(step[end - 1])),
        back,
    )


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
    step, value, kind, least = finite(curve)
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
