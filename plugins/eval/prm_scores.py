"""How well scores of turns agree with their labels: accuracy, AUC and calibration, with bootstrap intervals.

N: turns. Turns of a task resemble each other, so the bootstrap resamples tasks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from verl_turnkey.plugins.view.stats import Interval

Floats = NDArray[np.float64]
RESAMPLES = 1000
BINS = 10
EPS = 1e-6
"""scores are clipped to this distance from 0 and 1 in the cross entropy"""
MEASURES = ("accuracy", "auc", "cross_entropy", "squared_error", "calibration_error")


def measure(scores: ArrayLike, labels: ArrayLike, weights: ArrayLike | None = None) -> dict[str, float]:
    """The :data:`MEASURES` of scores against labels, (N,) each, from 0 to 1; nan for an undefined measure.

    ``accuracy``: score and label are both above 1/2, or both not. ``auc``: probability that a turn with a label above
    1/2 has a higher score than one without; ties count half. ``cross_entropy``: in nats, GUI-Shepherd's loss of the
    label token. ``squared_error``: the Brier score. ``calibration_error``: mean distance of score and label over ten
    bins of scores.

    Args:
        weights: (N,) how often each turn counts.
    """
    s, y = np.asarray(scores, np.float64), np.asarray(labels, np.float64)
    w = np.ones_like(s) if weights is None else np.asarray(weights, np.float64)
    total = w.sum()
    p = s.clip(EPS, 1 - EPS)
    bins = _bins(s)
    gaps = np.abs(np.bincount(bins, w * (s - y), BINS))
    return {
        "accuracy": float((w * ((s > 0.5) == (y > 0.5))).sum() / total),
        "auc": auc(s, y > 0.5, w),
        "cross_entropy": float(-(w * (y * np.log(p) + (1 - y) * np.log(1 - p))).sum() / total),
        "squared_error": float((w * (s - y) ** 2).sum() / total),
        "calibration_error": float(gaps.sum() / total),
    }


def auc(scores: Floats, positive: NDArray[np.bool_], weights: Floats) -> float:
    """Area under the ROC curve, (N,) each; nan if one class is absent."""
    _, place = np.unique(scores, return_inverse=True)
    of_positives = np.bincount(place, weights * positive)
    of_negatives = np.bincount(place, weights * ~positive)
    number = of_positives.sum() * of_negatives.sum()
    below = np.cumsum(of_negatives) - of_negatives / 2
    return float((of_positives * below).sum() / number) if number else math.nan


def calibration(scores: ArrayLike, labels: ArrayLike) -> list[tuple[int, float, float]]:
    """Number of turns, mean score and mean label of each bin of scores that is not empty."""
    s, y = np.asarray(scores, np.float64), np.asarray(labels, np.float64)
    bins = _bins(s)
    return [(int((bins == b).sum()), float(s[bins == b].mean()), float(y[bins == b].mean())) for b in np.unique(bins)]


def _bins(scores: Floats) -> NDArray[np.intp]:
    return np.minimum(scores * BINS, BINS - 1).astype(np.intp)


def resamples(tasks: Sequence[str], seed: int = 0) -> Iterator[Floats]:
    """Bootstrap over tasks: how often each turn counts, (N,), in each of :data:`RESAMPLES` draws.

    ``tasks``: the task of each turn, (N,).
    """
    _, of_turn = np.unique(np.asarray(tasks, str), return_inverse=True)
    rng, number = np.random.default_rng(seed), int(of_turn.max()) + 1
    for _ in range(RESAMPLES):
        yield np.bincount(rng.integers(number, size=number), minlength=number)[of_turn].astype(np.float64)


def evaluate(
    scores: ArrayLike, labels: ArrayLike, tasks: Sequence[str], *, confidence: float = 0.95, seed: int = 0
) -> Mapping[str, Interval]:
    """:func:`measure` with percentile intervals over tasks; ``tasks``: of each turn, (N,).

    Raises:
        ValueError: no turn, or a score outside of 0 and 1.
    """
    s, y = np.asarray(scores, np.float64), np.asarray(labels, np.float64)
    if not s.size or not np.all((s >= 0) & (s <= 1)):
        raise ValueError(f"expected scores from 0 to 1 of at least one turn, got {s.tolist()[:5]}")
    measured = measure(s, y)
    drawn = [measure(s, y, weights) for weights in resamples(tasks, seed)]
    tails = (0.5 - confidence / 2, 0.5 + confidence / 2)
    result = {}
    for name in MEASURES:
        finite = [values[name] for values in drawn if math.isfinite(values[name])]
        low, high = np.quantile(finite, tails) if finite else (math.nan, math.nan)
        result[name] = Interval(measured[name], float(low), float(high))
    return result
