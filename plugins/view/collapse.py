"""When a run lost its success, and what else changed around that step: curves by step in, plain numbers out.

The rules over a log (``health.py``) and the comparison of runs (``compare.py``) apply it to different curves.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

RECENT = 3
"""fewest steps whose mean is a level of success"""
CHANCE = 0.05
"""highest share of runs with constant success in which chance shows a fall (Bonferroni over pairs of steps)"""
LEAST = 0.2
"""a run that never was at this level of success cannot lose it"""
POINTS, TIMES, PEAK = 0.1, 1.5, 3.0
"""what counts as a change: difference of a share, ratio of a size, ratio of a peak to the median before it"""

Kind = Literal["share", "size", "peak"]
UPDATE: dict[str, tuple[str, float]] = {
    "KL": ("actor/ppo_kl", 0.02),
    "clipped": ("actor/pg_clipfrac", 0.2),
    "norm of the gradient": ("actor/grad_norm", 0.0),
}
"""metrics of an update, each with its largest healthy value (docs/metrics.md); a single update can ruin a policy"""


class Curve(NamedTuple):
    """A quantity by step, both (S,). A ``share`` is at most 1; of a ``peak``, single steps above ``least`` matter.

    ``episodes``: for success, the number of independent episodes that a step is worth; infinite: no noise.
    """

    step: NDArray[Any]
    value: Numbers
    kind: Kind = "size"
    least: float = 0.0
    episodes: float = np.inf


class Fall(NamedTuple):
    """A loss of success. The level at a step is the mean of the last ``width`` steps, fewer at the start."""

    best: float
    best_at: int
    """step of the best level"""
    last: float
    """level at the end, or the lowest level if success came back"""
    turn: int
    """step with the largest loss"""
    steps: list[int]
    """steps below half of the best level"""
    within: tuple[int, int]
    """first and last step in which other quantities are searched for changes"""
    width: int
    back: int | None = None
    """step at which success was back at half of the best level"""


class Change(NamedTuple):
    """A quantity that changed around a fall, and the first step after the change."""

    what: str
    kind: Kind
    before: float
    after: float
    step: int


def fall(success: Curve, validation: Curve | None = None) -> Fall | None:
    """The last fall of success to less than half, by more than chance explains; None if validation kept its success.

    Levels are means of 3 steps, or if these show no fall, of 6, 12, ...: with few groups per step, 3 are too noisy.
    """
    curve, width = finite(success), RECENT
    while (drop := _fall(curve, width)) is None:
        if (width := 2 * width) > len(curve.value):
            return None
    return None if validation is not None and _held(finite(validation), drop) else drop


def _fall(curve: Curve, width: int) -> Fall | None:
    """The last fall below half of an earlier level by more than the noise between any two levels of the run."""
    step, value, number = curve.step, curve.value, len(curve.value)
    steps = np.minimum(np.arange(number) + 1, width)  # averaged by each level
    level = np.array([value[i - n : i].mean() for i, n in enumerate(steps, 1)])
    sigmas = NormalDist().inv_cdf(1 - CHANCE / max(1, number) ** 2)
    for low in np.flatnonzero(level < np.maximum.accumulate(level) / 2)[::-1]:
        high, n = level[:low], steps[:low]
        p = (n * high + steps[low] * level[low]) / (n + steps[low])  # pooled, as if nothing was lost
        noise = np.sqrt(np.maximum(p * (1 - p), 0) * (1 / n + 1 / steps[low]) / curve.episodes)
        half = (high >= LEAST) & (level[low] < high / 2)
        lost = np.where(half, high - level[low] - sigmas * noise, 0.0)
        if lost.max() > 0:
            break
    else:
        return None
    at = int(low) - 1 - int(lost[::-1].argmax())  # the last of equal levels: the loss comes after it
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
    """Whether validation kept three quarters of its success. Validation after step s plays the policy of step s + 1."""
    step, value = validation.step + 1, validation.value
    before = value[(step >= drop.within[0]) & (step < drop.turn)]
    during = value[(step >= drop.steps[0]) & (step < (drop.back or np.inf))]
    return len(before) > 0 and len(during) > 0 and bool(during.mean() >= 0.75 * before[-1])


def changes(curves: Mapping[str, Curve], drop: Fall) -> list[Change]:
    """The quantities that changed while success fell, in order of step."""
    moved = [change for name, curve in curves.items() if (change := _change(name, curve, drop))]
    return sorted(moved, key=lambda change: change.step)


def change_rows(drop: Fall, moved: list[Change]) -> list[dict[str, Any]]:
    """Rows of a table: the changes, and among them the fall of success, in order of step."""
    success = Change("success", "share", drop.best, drop.last, drop.turn)
    return [
        {
            "step": change.step,
            "what": change.what,
            "before": formatted(change.before, change.kind),
            "after": formatted(change.after, change.kind),
            "fall": change is success,
        }
        for change in sorted([*moved, success], key=lambda change: (change.step, change is not success))
    ]


def formatted(value: float, kind: Kind) -> str:
    if kind != "share":
        return f"{value:.3g}"
    return f"{100 * value:.0f} %" if value >= 0.01 or value == 0 else f"{100 * value:.1f} %"


def finite(curve: Curve) -> Curve:
    """The steps with a finite number, in order."""
    step, value = np.asarray(curve.step, float), np.asarray(curve.value, float)
    there = np.isfinite(value) & np.isfinite(step)
    order = np.argsort(step[there], kind="stable")
    return curve._replace(step=step[there][order], value=value[there][order])


def split(value: Numbers) -> int:
    """The best cut of a curve into two levels: index of the first number of the second level, 0 for a short curve.

    Least squares; each level has at least two numbers, so that one outlier is not a level.
    """
    cuts = range(2, len(value) - 1)
    return min(cuts, key=lambda k: _scatter(value, k), default=0)


def _scatter(value: Numbers, k: int) -> float:
    return float(((value[:k] - value[:k].mean()) ** 2).sum() + ((value[k:] - value[k:].mean()) ** 2).sum())


def _change(name: str, curve: Curve, drop: Fall) -> Change | None:
    step, value, kind, least, _ = finite(curve)
    within = (step >= drop.within[0]) & (step <= drop.within[1])
    if kind == "peak":
        return _peak(name, step, abs(value), within, least)
    step, value = step[within], value[within]
    if not (k := split(value)):
        return None
    before, after = float(value[:k].mean()), float(value[k:].mean())
    noise = (_scatter(value, k) / len(value)) ** 0.5
    low, high = sorted((abs(before), abs(after)))
    large = abs(after - before) >= POINTS if kind == "share" else high >= TIMES * low and high > 0
    return Change(name, kind, before, after, int(step[k])) if large and abs(after - before) > 2 * noise else None


def _peak(name: str, step: Numbers, value: Numbers, within: NDArray[np.bool_], least: float) -> Change | None:
    """The largest value while success fell, if it is far above the median until then."""
    if not within.any():
        return None
    at = int(np.flatnonzero(within)[value[within].argmax()])
    early = at < RECENT  # too few steps before: compare with later ones, far above the healthy value
    if early and (least == 0 or len(value) <= RECENT):
        return None
    usual = float(np.median(np.delete(value, at) if early else value[:at]))
    least *= PEAK if early else 1
    largest = float(value[at])
    return Change(name, "peak", usual, largest, int(step[at])) if largest > max(least, PEAK * usual) else None
