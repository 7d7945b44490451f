"""Statistics of evaluations and learning curves, in numpy.

T: tasks; R: runs (seeds); N: evaluations of a curve. Every interval is two-sided at ``confidence``; every bootstrap is
a percentile bootstrap with its own seed, so that the same numbers give the same interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Statistic = Callable[..., Any]
"""``f(values, axis=...)``, such as ``np.mean``"""

RESAMPLES = 10_000
CHUNK = 1 << 22
"""most values drawn at once, which bounds the memory of a bootstrap"""


class Interval(NamedTuple):
    """An estimate and its confidence interval."""

    value: float
    low: float
    high: float


# --- success of an evaluation: c of n samples of each task solved -----------------------------------------------------


def pass_at_k(solved: ArrayLike, samples: ArrayLike, k: int) -> Floats:
    """Probability that at least one of ``k`` samples of a task is solved: 1 - C(n-c, k) / C(n, k), unbiased.

    Args:
        solved: c, (T,) numbers of solved samples.
        samples: n, (T,) or a number for all tasks, at least ``k``.

    Returns:
        (T,); the score of the evaluation is its mean. Chen et al. 2021, arXiv:2107.03374, eq. 1.

    Raises:
        ValueError: ``k`` is not within 1 and n, or c not within 0 and n.
    """
    c, n = _counts(solved, samples)
    if k < 1 or np.any(n < k):
        raise ValueError(f"pass@k needs 1 <= k <= samples of every task, got k={k} and {int(n.min())} samples")
    # C(n-c, k) / C(n, k) as a product of k factors of at most 1: the binomials themselves overflow.
    i = np.arange(k)
    return 1.0 - np.prod(np.maximum(n[:, None] - c[:, None] - i, 0) / (n[:, None] - i), axis=1)


def wilson(p: float, n: float, confidence: float = 0.95) -> Interval:
    """Wilson's score interval of a share ``p`` of ``n`` independent samples: it contains ``p``, and is never empty."""
    if not (0 <= p <= 1 and n > 0):
        raise ValueError(f"expected a share within 0 and 1 of more than 0 samples, got {p} of {n}")
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # Shares of 0 and 1 are bounds themselves, but for rounding.
    return Interval(p, min(p, max(0.0, (middle - half) / scale)), max(p, min(1.0, (middle + half) / scale)))


def success(solved: ArrayLike, samples: ArrayLike, confidence: float = 0.95) -> Interval:
    """Mean success over tasks, with Wilson's interval at the effective number of samples.

    Samples of a task resemble each other, so n samples are worth less than n independent ones. The effective number is
    p(1-p) / (variance of the tasks' means / T), clamped between the numbers of tasks and of samples. If all tasks have
    the same mean, it is the number of samples; if all samples or none are solved, their similarity within a task is
    unknown, and it is the number of tasks.
    """
    c, n = _counts(solved, samples)
    means = c / n
    p, tasks, total = float(means.mean()), len(means), float(n.sum())
    spread = float(means.var(ddof=1)) / tasks if tasks > 1 else 0.0
    if p * (1 - p) == 0 or tasks == 1:
        effective = float(tasks)
    else:
        effective = min(max(p * (1 - p) / spread, tasks), total) if spread > 0 else total
    return wilson(p, effective, confidence)


def _counts(solved: ArrayLike, samples: ArrayLike) -> tuple[Floats, Floats]:
    c = np.asarray(solved, np.float64)
    if c.ndim != 1 or not c.size:
        raise ValueError(f"expected the solved samples of each task, (T,), got shape {c.shape}")
    n = np.broadcast_to(np.asarray(samples, np.float64), c.shape)
    if np.any((c < 0) | (c > n) | (n < 1)):
        raise ValueError("expected 0 <= solved <= samples and at least one sample in every task")
    return c, n


# --- resampling -------------------------------------------------------------------------------------------------------


def bootstrap(
    values: ArrayLike,
    statistic: Statistic = np.mean,
    *,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Resample independent units, such as tasks or seeds.

    Args:
        values: (T,) a number per task; for a paired comparison the differences. Or (R, T): the runs of each task are
            resampled separately (stratified by task), and the statistic is over all numbers.
        statistic: of the numbers, along ``axis``.
    """
    table = np.asarray(values, np.float64)
    if table.ndim not in (1, 2) or not table.size:
        raise ValueError(f"expected numbers of shape (T,) or (R, T), got {table.shape}")
    table = table[:, None] if table.ndim == 1 else table
    rng = np.random.default_rng(seed)
    columns, at_once = np.arange(table.shape[1]), max(1, CHUNK // table.size)
    drawn = []
    for first in range(0, resamples, at_once):
        rows = rng.integers(len(table), size=(min(at_once, resamples - first), *table.shape))
        drawn.append(statistic(table[rows, columns].reshape(len(rows), -1), axis=1))
    return _interval(float(statistic(table.reshape(-1), axis=0)), np.concatenate(drawn), confidence)


def _interval(value: float, drawn: Floats, confidence: float) -> Interval:
    low, high = np.quantile(drawn, (0.5 - confidence / 2, 0.5 + confidence / 2))
    return Interval(value, float(low), float(high))


def interquartile_mean(values: ArrayLike, axis: int = 0) -> Any:
    """Mean without the lowest and the highest quarter, each rounded down (Agarwal et al. 2021, arXiv:2108.13264)."""
    ordered = np.sort(np.asarray(values, np.float64), axis=axis)
    number = ordered.shape[axis]
    cut = number // 4
    return np.take(ordered, range(cut, number - cut), axis=axis).mean(axis=axis)


def improvement(
    a: ArrayLike, b: ArrayLike, *, confidence: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Probability that a run of ``a`` is better than one of ``b``, ties half; mean over tasks (arXiv:2108.13264).

    Args:
        a, b: (R,) or (R, T), with different R if need be. Runs are resampled within each task and side.
    """
    tables = [np.asarray(side, np.float64) for side in (a, b)]
    a, b = (table[:, None] if table.ndim == 1 else table for table in tables)
    if a.ndim != 2 or b.ndim != 2 or not a.size or not b.size or a.shape[1] != b.shape[1]:
        raise ValueError(f"expected (R,) or (R, T) with the same tasks, got {tables[0].shape} and {tables[1].shape}")
    better = (a[:, None] > b[None]) + 0.5 * (a[:, None] == b[None])  # (R of a, R of b, T)
    rng, tasks = np.random.default_rng(seed), np.arange(a.shape[1])
    at_once = max(1, CHUNK // better.size)
    drawn = []
    for first in range(0, resamples, at_once):
        number = min(at_once, resamples - first)
        i = rng.integers(len(a), size=(number, *a.shape))
        j = rng.integers(len(b), size=(number, *b.shape))
        drawn.append(better[i[:, :, None], j[:, None], tasks].mean(axis=(1, 2, 3)))
    return _interval(float(better.mean()), np.concatenate(drawn), confidence)


# --- ratings of players who met in games ------------------------------------------------------------------------------
DRAWS = 1.0
"""extra draws for each pair that met, without which a player who won every game has no finite rating"""
ELO = 400 / math.log(10)
MEAN_RATING = 1000.0


def ratings(ends: ArrayLike, *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0) -> list[Interval]:
    """Elo ratings: the maximum-likelihood Bradley-Terry model, with a draw as half a win; their mean is 1000.

    For the intervals, the tasks of each pair and both halves of its extra draw get random weights: the Bayesian
    bootstrap (Rubin 1981), in which a player who won every game may also be better or worse than that.

    Args:
        ends: (P, P, T, 3) numbers of games between two players in a task, by how they ended for the first: won, drawn,
            lost. Each game counts once, in either place of its pair.

    Raises:
        ValueError: some players are not connected by games.
    """
    games = np.asarray(ends, np.float64)
    games = games + games.transpose(1, 0, 2, 3)[..., ::-1]
    met = games.sum(axis=(2, 3)) > 0
    if not np.all(np.linalg.matrix_power(met + np.eye(len(met)), len(met)) > 0):
        raise ValueError("some players are not connected by games")
    points, rng = np.zeros((1 + resamples, *met.shape)), np.random.default_rng(seed)
    for i, j in np.argwhere(np.triu(met)):
        of_tasks = games[i, j] @ [[1, 0], [0.5, 0.5], [0, 1]]  # (T, 2)
        units = np.concatenate([of_tasks[games[i, j].any(axis=1)], DRAWS / 2 * np.eye(2)])
        weights = rng.exponential(size=(resamples, len(units)))
        points[:, [i, j], [j, i]] = np.concatenate([np.ones((1, len(units))), weights]) @ units
    return [_interval(float(of_player[0]), of_player[1:], confidence) for of_player in _strengths(points).T]


def _strengths(points: Floats) -> Floats:
    """(R, P) ratings of R tables of points (R, P, P), by Hunter's minorization-maximization (2004, eq. 3)."""
    number, strength = points + np.swapaxes(points, 1, 2), np.ones(points.shape[:2])
    for _ in range(10_000):
        before = strength
        strength = points.sum(axis=2) / (number / (before[:, :, None] + before[:, None])).sum(axis=2)
        strength /= np.exp(np.log(strength).mean(axis=1, keepdims=True))
        if np.allclose(strength, before, rtol=1e-6, atol=0):
            break
    return MEAN_RATING + ELO * np.log(strength)


# --- learning curves: N evaluations y at increasing x -----------------------------------------------------------------


def area(x: Sequence[float], y: Sequence[float], start: float, end: float) -> float:
    """Mean height of a curve from ``start`` to ``end``: the area by trapezoids, divided by the distance.

    ``end`` is the smallest budget of the compared curves. If it equals ``start``, the result is the height there.
    """
    at, heights = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if not (at.size and np.all(np.diff(at) > 0) and at[0] <= start <= end <= at[-1]):
        raise ValueError(f"expected increasing x from {start} or before to {end} or after, got {at.tolist()}")
    if start == end:
        return float(np.interp(start, at, heights))
    grid = np.concatenate([[start], at[(at > start) & (at < end)], [end]])
    height = np.interp(grid, at, heights)
    return float(np.sum(np.diff(grid) * (height[1:] + height[:-1])) / 2 / (end - start))


def first_reached(y: Sequence[float] | Floats, level: float) -> int | None:
    """Index of the first evaluation at or above ``level`` whose successor is, too; so the last one does not count."""
    above = np.asarray(y, np.float64) >= level
    reached_at = np.flatnonzero(above[:-1] & above[1:])
    return int(reached_at[0]) if reached_at.size else None


def steps_to(x: Sequence[float] | Floats, y: Sequence[float] | Floats, level: float) -> float:
    """``x`` of :func:`first_reached`; infinite if the level is not reached."""
    index = first_reached(y, level)
    return math.inf if index is None else float(x[index])


def reached(costs: Sequence[float]) -> str:
    """In words: ``3 of 5, median 40``; a run that did not reach the level counts as infinite."""
    number, middle = sum(map(math.isfinite, costs)), float(np.median(costs)) if costs else math.inf
    share = f"{number} of {len(costs)}"
    return f"{share}, median {middle:{'.0f' if middle >= 100 else 'g'}}" if math.isfinite(middle) else share
