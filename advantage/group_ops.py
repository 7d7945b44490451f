"""Vectorised arithmetic on groups and trajectories of steps: float64, independent of the order of the rows.

A trajectory may be a tree of steps (:class:`Conversations`): parallel samples, branches, workers, sub-agents.

Every function costs at most one sort. Within a group, values are summed in sorted order, so shuffling the rows or
renaming the groups does not change a single bit of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Values = TypeVar("Values", NDArray[np.float64], NDArray[np.int64])
Norm = Literal["mean_std", "mean"]
Std = Literal["sample", "population"]
EPSILON = 1e-6  # added to standard deviations


@dataclass(frozen=True)
class Conversations:
    """Which step goes on after which, where steps are not simply one after the other. All (S,) are in row order.

    ``parent`` (S,): the row of the step whose reply the step's request holds; -1: it begins a conversation. ``request``
    (S,): equal for samples of one request, which have the same parent. ``distance`` (S,): steps that follow on the
    longest way from any sample of the request. ``height`` (S,): those that follow the step itself, 0 where none does.
    ``main`` (S,): it lies on a longest way from its parent. ``levels``: the rows by their number of ancestors, in order
    of the step's number.
    """

    parent: Ints
    request: Ints
    distance: Ints
    height: Ints
    main: Bools
    levels: list[Ints]


def conversations(parent: Ints, request: Ints, step: Ints) -> Conversations:
    """From parents and requests (S,); a parent's ``step`` (S,) is below that of the steps that go on after it."""
    depth = np.zeros(len(parent), dtype=np.int64)
    by_step = np.argsort(step, kind="stable")
    for row in by_step.tolist():
        if parent[row] >= 0:
            depth[row] = depth[parent[row]] + 1
    levels = [by_step[depth[by_step] == level] for level in range(int(depth.max(initial=-1)) + 1)]
    height, distance = np.zeros_like(depth), np.zeros_like(depth)
    longest = np.zeros(int(request.max(initial=-1)) + 1, dtype=np.int64)  # by request
    for rows in reversed(levels):
        np.maximum.at(longest, request[rows], height[rows])
        distance[rows] = longest[request[rows]]
        later = rows[parent[rows] >= 0]
        np.maximum.at(height, parent[later], distance[later] + 1)
    main = (parent >= 0) & (distance + 1 == height[parent])
    return Conversations(parent, request, distance, height, main, levels)


def read_conversations(
    trajectory: Ints,
    step: Ints,
    order: Ints,
    after: Iterable[Any],
    request: Iterable[Any] | None,
    place: Callable[[int], str],
) -> Conversations | None:
    """The columns ``after`` and ``request`` of a batch whose rows are in ``order`` by trajectory and step; None: no
    trajectory is a tree.

    Raises:
        ValueError: an ``after`` names no earlier step of its trajectory, or samples of a request go on after two steps.
    """
    after = [None if value is None else int(value) for value in after]
    if all(value is None for value in after):
        return None
    requests = [None] * len(after) if request is None else list(request)
    steps = list(zip(trajectory.tolist(), step.tolist(), strict=True))
    rows = {key: row for row, key in enumerate(steps)}
    parent, code = np.full(len(after), -1), np.zeros(len(after), dtype=np.int64)
    codes: dict[Any, int] = {}
    of_request: dict[int, int] = {}
    before = (-1, -1)
    for row in order.tolist():
        name, number = steps[row]
        if after[row] is None:
            parent[row] = rows[before] if before[0] == name else -1
        elif after[row] != -1:
            parent[row] = rows.get((name, after[row]), -1)
            if parent[row] < 0 or after[row] >= number:
                raise ValueError(
                    f"after: {place(row)}: expected -1 or an earlier step of its trajectory, got {after[row]}"
                )
        key = (row,) if requests[row] is None else (name, requests[row])
        code[row] = number_of_request = codes.setdefault(key, len(codes))
        if of_request.setdefault(number_of_request, int(parent[row])) != parent[row]:
            raise ValueError(f"request: {place(row)}: another sample of its request goes on after another step")
        before = (name, number)
    return conversations(parent, code, step)


@dataclass(frozen=True)
class Runs:
    """The rows of each trajectory in step order.

    ``order`` (S,) lists the rows by (trajectory, step); those of trajectory ``k`` begin at ``starts[k]``, and
    there are ``lengths[k]`` of them. ``tree``: which step goes on after which; None: each after the one before it.
    """

    order: Ints
    starts: Ints
    lengths: Ints
    tree: Conversations | None = None

    @property
    def last(self) -> Ints:
        """The row of each trajectory's last step, (n_trajectories,)."""
        return self.order[self.starts + self.lengths - 1]

    @property
    def ends(self) -> Ints:
        """The rows after which nothing follows: the last step of each trajectory, or of each of its conversations."""
        return self.last if self.tree is None else np.flatnonzero(self.tree.distance == 0)


def sort_runs(trajectory: Ints, step: Ints, tree: Conversations | None = None) -> Runs:
    """Runs of ``trajectory`` (S,), codes 0..n-1 that all occur, by ``step`` (S,)."""
    lengths = np.bincount(trajectory)
    return Runs(np.lexsort((step, trajectory)), np.cumsum(lengths) - lengths, lengths, tree)


def run_sums(values: Floats, runs: Runs) -> Floats:
    """Sum of ``values`` (S,) over each trajectory -> (n_trajectories,)."""
    return np.add.reduceat(values[runs.order], runs.starts)


def discounted_returns(reward: Floats, runs: Runs, gamma: float | Floats) -> Floats:
    """``R_t = r_t + gamma_t * R_{t+1}`` inside each trajectory; ``reward`` and the result are (S,), in row order.

    ``gamma``: one number, or one for each row, (S,). Where steps form a tree, ``R_{t+1}`` is the mean over the steps
    that follow on a longest way: :func:`conversation_rewards` makes rewards for it.

    Goes backwards from the end of all trajectories at once: one numpy call per step of the longest, O(S) work in total,
    and exactly the rounding of the plain recursion (dividing by ``gamma**t`` would overflow on long trajectories).
    """
    if runs.tree is not None:
        total = reward.copy()
        discount = np.broadcast_to(gamma, reward.shape)
        for rows in runs.tree.levels[:0:-1]:
            rows = rows[runs.tree.main[rows]]
            parents, stats = stats_by(runs.tree.parent[rows], total[rows])
            total[parents] += discount[parents] * stats.mean
        return total
    total = reward[runs.order]
    discount = np.broadcast_to(gamma, reward.shape)[runs.order]
    longest_first = np.argsort(-runs.lengths, kind="stable")
    last = (runs.starts + runs.lengths - 1)[longest_first]
    # alive[k]: how many trajectories reach k steps back from their end
    alive = len(last) - np.cumsum(np.bincount(runs.lengths, minlength=1))
    for back in range(1, len(alive) - 1):
        here = last[: alive[back]] - back
        total[here] += discount[here] * total[here + 1]
    result = np.empty_like(total)
    result[runs.order] = total
    return result


def conversation_rewards(reward: Floats, outcome: Floats, runs: Runs, gamma: float) -> Floats:
    """Rewards (S,) whose :func:`discounted_returns` are the returns of a tree of steps; ``reward`` where there is none.

    ::

        R(t) = sum of gamma^k (r - outcome)(u) over t and all steps u that follow it, k steps later
               + gamma^(distance of t) (sum of outcome over the trajectory)

    ``outcome`` (S,) is the part of ``reward`` (S,) that the trajectory earned as a whole: every step gets it, samples
    of one request alike, whether anything goes on after them or not.
    """
    tree = runs.tree
    if tree is None:
        return reward
    of_step = reward - outcome
    below = of_step.copy()  # rewards from the step on
    aside = np.zeros_like(of_step)  # those that no longest way leads to
    for rows in tree.levels[:0:-1]:
        parents, every = stats_by(tree.parent[rows], below[rows])
        main = rows[tree.main[rows]]
        _, longest = stats_by(tree.parent[main], below[main])  # of the same parents
        aside[parents] = gamma * np.where(every.size == 1, 0.0, every.size * every.mean - longest.mean)
        below[parents] += gamma * every.size * every.mean
    ends = at_the_end(np.repeat(run_sums(outcome, runs), runs.lengths)[np.argsort(runs.order)], runs, gamma)
    return of_step + aside + ends


def at_the_end(values: Floats, runs: Runs, gamma: float) -> Floats:
    """Rewards (S,) whose :func:`discounted_returns` are ``gamma^(steps to the end)`` times ``values`` (S,)."""
    if runs.tree is not None:
        distance, height = runs.tree.distance, runs.tree.height
        return values * (np.power(gamma, distance) - np.where(height > 0, np.power(gamma, height), 0.0))
    result = np.zeros_like(values)
    result[runs.last] = values[runs.last]
    return result


def stats_by(keys: Ints, values: Floats) -> tuple[Ints, GroupStats]:
    """The different ``keys``, sorted, and the statistics of the ``values`` of each."""
    distinct, codes = np.unique(keys, return_inverse=True)
    return distinct, group_stats(values, codes.reshape(-1), len(distinct))


def cut_runs(runs: Runs, ends: Bools) -> Runs:
    """``runs`` with a further border after every row where ``ends`` (S,) is true."""
    first = np.zeros(len(runs.order), dtype=bool)
    first[runs.starts] = True
    first[1:] |= ends[runs.order[:-1]]
    starts = np.flatnonzero(first)
    tree = runs.tree
    if tree is not None and (cut := (tree.parent >= 0) & ends[tree.parent]).any():
        tree = conversations(np.where(cut, -1, tree.parent), tree.request, ordinals(runs))
    return replace(runs, starts=starts, lengths=np.diff(starts, append=len(first)), tree=tree)


def ordinals(runs: Runs) -> Ints:
    """Steps before each step in its trajectory, or in its conversation: (S,), in row order."""
    result = np.empty_like(runs.order)
    if runs.tree is not None:
        for depth, rows in enumerate(runs.tree.levels):
            result[rows] = depth
        return result
    result[runs.order] = np.arange(len(runs.order)) - np.repeat(runs.starts, runs.lengths)
    return result


def distances(runs: Runs) -> Ints:
    """Steps from each step to the end of its trajectory, or of its conversation: (S,), in row order."""
    if runs.tree is not None:
        return runs.tree.distance
    result = np.empty_like(runs.order)
    result[runs.order] = np.repeat(runs.starts + runs.lengths, runs.lengths) - 1 - np.arange(len(runs.order))
    return result


def next_values(values: Values, runs: Runs, last: Values | float | int) -> Values:
    """``values`` (S,) of the following step of the same trajectory; ``last`` (a number or (S,)) after its last step.

    In a tree: the mean over the steps that follow on a longest way, of integers the smallest.
    """
    if (tree := runs.tree) is not None:
        following: Any = np.broadcast_to(last, values.shape).astype(values.dtype)
        for rows in tree.levels[1:]:
            rows = rows[tree.main[rows]]
            if values.dtype == np.int64:
                following[tree.parent[rows]] = np.iinfo(np.int64).max
                np.minimum.at(following, tree.parent[rows], values[rows])
            else:
                parents, stats = stats_by(tree.parent[rows], cast("Floats", values)[rows])
                following[parents] = stats.mean
        return following
    result = np.empty_like(values)
    result[runs.order[:-1]] = values[runs.order[1:]]
    final = runs.last
    result[final] = np.broadcast_to(last, values.shape)[final]
    return result


def previous_values(values: Values, runs: Runs, first: Values | float | int) -> Values:
    """``values`` (S,) of the preceding step of the same trajectory; ``first`` (a number or (S,)) before its first."""
    if runs.tree is not None:
        before: Any = np.where(runs.tree.parent >= 0, values[runs.tree.parent], first)
        return before.astype(values.dtype)
    result = np.empty_like(values)
    result[runs.order[1:]] = values[runs.order[:-1]]
    begin = runs.order[runs.starts]
    result[begin] = np.broadcast_to(first, values.shape)[begin]
    return result


def running_sums(values: Values, runs: Runs) -> Values:
    """Sum of ``values`` (S,) over each step and those before it in its trajectory, or its conversation -> (S,)."""
    if runs.tree is not None:
        total = values.copy()
        for rows in runs.tree.levels[1:]:
            total[rows] += total[runs.tree.parent[rows]]
        return total
    trajectory = np.repeat(np.arange(len(runs.starts)), runs.lengths)
    place = ordinals(runs)[runs.order]
    grid = np.zeros((len(runs.starts), int(runs.lengths.max(initial=0))), dtype=values.dtype)
    grid[trajectory, place] = values[runs.order]
    result = np.empty_like(values)
    result[runs.order] = grid.cumsum(axis=1)[trajectory, place]
    return result


def joint_codes(first: Ints, second: Ints) -> tuple[Ints, int]:
    """Codes (S,) that are equal where both inputs are equal, and their number."""
    distinct, codes = np.unique(first * (second.max(initial=0) + 1) + second, return_inverse=True)
    return codes.reshape(-1), len(distinct)


#: Values of order one (larger ones: relatively) that differ by no more count as the same number, summed in another
#: order. Without it the noise of 0.1 + 0.2 - 0.3 would be a group's spread, and a row outside the statistics huge.
ROUNDING = 1e-12


def equal(a: Floats | float, b: Floats | float) -> Bools:
    """Element by element: equal except for rounding (see :data:`ROUNDING`)."""
    return np.abs(a - b) <= ROUNDING * np.maximum(1.0, np.maximum(np.abs(a), np.abs(b)))


def mean(values: Floats | Bools) -> float:
    """The mean of ``values``, whatever their order; 0 of none."""
    return float(np.sort(values).mean()) if len(values) else 0.0


@dataclass(frozen=True)
class GroupStats:
    """Per group code: ``size`` (G,), ``mean`` (G,), ``std`` (G,). A constant group has its value as mean and std 0."""

    size: Ints
    mean: Floats
    std: Floats


def group_stats(values: Floats, codes: Ints, n: int, std: Std = "sample", weights: Ints | None = None) -> GroupStats:
    """Mean and standard deviation of ``values`` (S,) over the groups ``codes`` (S,), integers in [0, n).

    Groups may be empty (all three 0) or have one value (std 0). A constant group is recognised by its smallest and
    largest value (see :data:`ROUNDING`), never by a rounded variance: its centred values are exactly 0. ``weights``
    (S,), integers >= 0: how often a value counts, such as the number of a turn's tokens.
    """
    order = np.lexsort((values, codes) if weights is None else (weights, values, codes))
    times: Floats | float = 1.0
    if weights is not None:
        order = order[weights[order] > 0]
        times = weights[order].astype(np.float64)
    ordered = values[order]
    rows = np.bincount(codes[order], minlength=n)
    size = rows if weights is None else np.bincount(codes[order], times, n).astype(np.int64)
    present = np.flatnonzero(rows)
    count = size[present]
    ends = np.cumsum(rows[present])
    starts = ends - rows[present]
    low, high = ordered[starts], ordered[ends - 1]
    constant = equal(low, high)
    mean, deviation = np.zeros(n), np.zeros(n)
    mean[present] = np.where(constant, low, np.add.reduceat(times * ordered, starts) / count)
    square = times * (ordered - np.repeat(mean[present], rows[present])) ** 2
    freedom = np.maximum(count - (1 if std == "sample" else 0), 1)
    deviation[present] = np.where(constant, 0.0, np.sqrt(np.add.reduceat(square, starts) / freedom))
    return GroupStats(size, mean, deviation)


def against_others(values: Floats, codes: Ints, stats: GroupStats) -> Floats:
    """``values`` minus the mean of the others in the group, n / (n - 1) times ``values - mean`` -> (S,).

    A group of one has no others and gives 0, as does a constant group.
    """
    n = stats.size[codes]
    centred = normalize(values, codes, stats, "mean", 0.0)
    return np.where(n > 1, centred * n / np.maximum(n - 1, 1), 0.0)


def normalize(values: Floats, codes: Ints, stats: GroupStats, norm: Norm, epsilon: float) -> Floats:
    """``values - mean`` within each group, with ``norm="mean_std"`` divided by ``std + epsilon`` -> (S,).

    A group without spread gives exactly 0 under ``mean_std``: ``epsilon`` alone is not a scale, and would blow up a row
    outside the statistics (see ``scope``) by 1e6.
    """
    mean = stats.mean[codes]
    centred = np.where(equal(values, mean), 0.0, values - mean)
    if norm == "mean":
        return centred
    spread = stats.std[codes]
    return np.where(spread > 0, centred / (spread + epsilon), 0.0)


def compared(
    values: Floats, codes: Ints, n: int, norm: Norm = "mean_std", epsilon: float = EPSILON, std: Std = "sample"
) -> Floats:
    """``values`` (S,) against all others of their groups ``codes``: :func:`normalize`, by their own statistics."""
    return normalize(values, codes, group_stats(values, codes, n, std), norm, epsilon)


def describe(name: str, part: Floats) -> dict[str, float]:
    """Mean, population std and share of non-zero entries of a part of the credit (S,), as metrics; 0 for no steps."""
    if not len(part):
        return {f"credit/{name}/mean": 0.0, f"credit/{name}/std": 0.0, f"credit/{name}/share_nonzero": 0.0}
    return {
        f"credit/{name}/mean": float(part.mean()),
        f"credit/{name}/std": float(part.std()),
        f"credit/{name}/share_nonzero": float(np.mean(part != 0)),
    }


def describe_groups(name: str, codes: Ints, n: int) -> dict[str, float]:
    """Metrics of the ``n`` groups ``codes`` (S,): number, sizes, and share of steps in groups of two or more."""
    size = np.bincount(codes, minlength=n)
    return {
        f"credit/{name}_groups": float(n),
        f"credit/{name}_group_size/mean": len(codes) / n if n else 0.0,
        f"credit/{name}_group_size/max": float(size.max(initial=0)),
        f"credit/share_steps_in_{name}_groups": float(np.mean(size[codes] >= 2)) if n else 0.0,
    }
