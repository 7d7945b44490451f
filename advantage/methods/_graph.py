"""The group's graph of states: where each step leads, how far states are from success, and what they are worth."""

from __future__ import annotations

import numpy as np

from verl_turnkey.advantage import group_ops as ops
from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.group_ops import Bools, Floats, Ints
from verl_turnkey.advantage.methods._step_columns import key_column

TERMINAL = -1  # code of the state after the last step
SWEEPS = 10_000  # of the Bellman iteration, at most
FINEST = 2.0**51  # terms are rounded to its inverse, so that float64 holds every sum of theirs exactly


def next_anchors(batch: StepBatch) -> Ints:
    """Code of the state that each step led to (S,), in the codes of ``batch.anchor``; TERMINAL after the end.

    It is ``extra["next_anchor"]`` (None: the end) when given, else the state of the trajectory's next step, or the end
    after the last. A given state is the anchor that it equals, or whose text it is, as ``turnkey_env`` writes it; one
    in which no step of the batch was taken has a code of its own.
    """
    if "extra.next_anchor" not in batch.given:
        return ops.next_values(batch.anchor, batch.runs, TERMINAL)
    codes, ids = key_column(batch, "next_anchor")
    anchors = {key: code for code, key in enumerate(batch.ids["anchor"])}
    anchors = {str(key): code for key, code in anchors.items()} | anchors
    beyond = 2 * len(batch)  # past every code of batch.anchor
    same = np.array([anchors.get(key, beyond + k) for k, key in enumerate(ids)], dtype=np.int64)
    return np.append(same, TERMINAL)[np.minimum(codes, len(ids))]


def distance_to_success(batch: StepBatch, solved: Bools) -> tuple[Floats, Floats]:
    """Steps from the state before, and from the state after each step, to success: two arrays (S,).

    The graph of a group has its states as nodes and its steps as edges; the last step of a trajectory that is
    ``solved`` (n_trajectories,) leads to success itself, at distance 0. A state from which no recorded step leads there
    has the largest distance of its group plus 1.
    """
    following = next_anchors(batch)
    ends = batch.runs.ends
    wins = np.zeros(len(batch), dtype=bool)
    wins[ends] = solved[batch.trajectory[ends]]
    state = np.concatenate([batch.anchor, following]) - TERMINAL
    node, n = ops.joint_codes(np.tile(batch.group, 2), state)
    tail, head = np.split(node, 2)
    head = np.where(wins, n, head)  # n: success; TERMINAL, of the others, leads nowhere

    distance = np.full(n + 1, np.inf)
    distance[n] = 0.0
    order = np.argsort(head, kind="stable")
    starts = np.searchsorted(head[order], np.arange(n + 2))
    frontier, steps = np.array([n]), 0
    while len(frontier):  # backwards from success: each edge is looked at once
        steps += 1
        count = starts[frontier + 1] - starts[frontier]
        edges = np.repeat(starts[frontier] + count - np.cumsum(count), count) + np.arange(count.sum())
        reached = np.unique(tail[order[edges]])
        frontier = reached[np.isinf(distance[reached])]
        distance[frontier] = steps
    before, after = distance[tail], distance[head]
    farthest = np.zeros(batch.n_groups)
    for away in (before, after):
        finite = np.isfinite(away)
        np.maximum.at(farthest, batch.group[finite], away[finite])
    beyond = farthest[batch.group] + 1.0
    return np.where(np.isinf(before), beyond, before), np.where(np.isinf(after), beyond, after)


def state_values(batch: StepBatch, gamma: float) -> tuple[Floats, Floats, float]:
    """Value of the state before each step (S,), what the step adds to it (S,), and the share of groups that converged.

    ``V(s) = gamma * mean of V(next) over the steps taken in s``, by Bellman iteration on the group's graph; after the
    end of a trajectory its score. The iteration starts at the mean discounted outcome of the state's steps, which is
    exact where no paths cross, and ends, for each group, before a sweep that changes no value but for rounding. A step
    adds ``gamma V(next) - V(s)``, exactly 0 where the two are the same but for rounding.
    """
    state, n = batch.anchor_groups
    following = ops.next_values(state, batch.runs, TERMINAL)
    last = np.flatnonzero(following == TERMINAL)
    largest, group = np.zeros(batch.n_groups), np.zeros(n, dtype=np.int64)
    np.maximum.at(largest, batch.group[last], np.abs(batch.score[last]))
    group[state] = batch.group
    unit = np.ldexp(1.0, np.frexp(largest)[1])[batch.group]  # a power of two: no score is above it, nor any value
    score = batch.score / unit
    outcome = ops.at_the_end(gamma * score, batch.runs, gamma)
    value = ops.group_stats(ops.discounted_returns(outcome, batch.runs, gamma), state, n).mean
    end = np.power(gamma, ops.distances(batch.runs)) * score

    edge, times = np.unique((state * n + following)[following != TERMINAL], return_counts=True)
    tail, head = edge // max(n, 1), edge % max(n, 1)
    steps = np.bincount(state, minlength=n)
    chance = gamma * times / steps[tail]
    ends = _exact_sums(gamma * end[last] / steps[state[last]], state[last], n)
    moving = np.zeros(batch.n_groups, dtype=bool)
    for _ in range(SWEEPS):
        new = ends + _exact_sums(chance * value[head], tail, n)
        moving = np.bincount(group, ~ops.equal(new, value), batch.n_groups) > 0
        if not moving.any():
            break
        value = np.where(moving[group], new, value)
    before = value[state]
    after = gamma * ops.next_values(before, batch.runs, end)
    converged = float(np.mean(~moving)) if batch.n_groups else 1.0
    return unit * before, unit * np.where(ops.equal(after, before), 0.0, after - before), converged


def visit_values(batch: StepBatch, gamma: float, end: Floats) -> tuple[Floats, Floats]:
    """Value of the state before, and of the state after each step: two arrays (S,).

    ``V(s) = mean of gamma^k R over the visits of s``: k steps, the one taken in s included, lead to the end of the
    visitor's trajectory, whose score is R. After the last step comes ``end`` (S,).
    """
    outcome = ops.at_the_end(gamma * batch.score, batch.runs, gamma)
    state, n = batch.anchor_groups
    value = ops.group_stats(ops.discounted_returns(outcome, batch.runs, gamma), state, n).mean[state]
    return value, ops.next_values(value, batch.runs, np.power(gamma, ops.distances(batch.runs)) * end)


def _exact_sums(terms: Floats, codes: Ints, n: int) -> Floats:
    """Sum of ``terms`` over each code (n,), the same in any order; the terms of a code add up to 1 at most."""
    return np.bincount(codes, np.rint(FINEST * terms), n) / FINEST
