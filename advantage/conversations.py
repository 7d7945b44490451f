"""Which step goes on after which, in trajectories that are a tree: parallel samples, branches, workers, sub-agents."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


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
