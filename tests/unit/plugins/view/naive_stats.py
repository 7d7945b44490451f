"""Statistics straight from their definitions: by enumeration, by hand, by a search for the root."""

import math
from itertools import combinations, pairwise
from statistics import NormalDist

from naive.common import mean


def pass_at_k(solved, samples, k):
    """The share of all choices of k samples with a solved one among them."""
    outcomes = [True] * solved + [False] * (samples - solved)
    chosen = list(combinations(outcomes, k))
    return sum(map(any, chosen)) / len(chosen)


def wilson(p, n, confidence=0.95):
    """The shares q at which p is just as far from q as a test at this level allows, by bisection."""
    z = NormalDist().inv_cdf(0.5 + confidence / 2)

    def end(inside, outside):
        for _ in range(200):
            q = (inside + outside) / 2
            near = abs(p - q) <= z * math.sqrt(q * (1 - q) / n)
            inside, outside = (q, outside) if near else (inside, q)
        return inside

    return end(p, 0.0), end(p, 1.0)


def interquartile_mean(values):
    ordered = sorted(values)
    while len(ordered) > len(values) - 2 * int(len(values) * 0.25):
        ordered = ordered[1:-1]
    return mean(ordered)


def improvement(a, b):
    """a, b: lists of runs, each a list of tasks."""
    tasks = range(len(a[0]))
    return mean([mean([1.0 if x[t] > y[t] else 0.5 if x[t] == y[t] else 0.0 for x in a for y in b]) for t in tasks])


def area(points, start, end, slices=4000):
    """Mean height of the curve in the middles of many slices."""

    def height(at):
        for (x, y), (u, v) in pairwise(points):
            if x <= at <= u:
                return y + (v - y) * (at - x) / (u - x)
        raise AssertionError(at)

    return mean([height(start + (end - start) * (i + 0.5) / slices) for i in range(slices)])
