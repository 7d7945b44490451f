"""Values of a group's states by the turns that are left, and baselines and targets along each trajectory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.group_ops import Bools, Floats, Ints, Runs, discounted_returns, joint_codes
from verl_turnkey.advantage.methods._graph import TERMINAL, next_anchors
from verl_turnkey.advantage.methods._step_columns import refuse_trees, step_column


@dataclass(frozen=True)
class Paths:
    """A batch's steps trajectory by trajectory, in an order that does not depend on the rows': arrays (S,) of it."""

    order: Ints
    """the rows of the batch"""
    group: Ints
    state: Ints
    """codes of the states of a group, those that steps only lead to included"""
    to: Ints
    """the state that the step leads to; where ``leads``"""
    leads: Bools
    """all but the steps that end a trajectory, unless the turn limit ended it"""
    reward: Floats
    position: Ints
    left: Ints
    """turns before the limit, this one included"""
    begin: Ints
    """the first step of each trajectory (n_trajectories,)"""
    length: Ints
    """steps of each trajectory (n_trajectories,)"""
    last: Bools
    cut: Bools
    """steps that the turn limit made the last"""
    cut_early: Bools
    """last steps of trajectories that neither the environment nor the turn limit ended"""

    @classmethod
    def of(cls, batch: StepBatch, horizon: int | None) -> Paths:
        """The steps of ``batch``. ``horizon``: the turn limit; None: as :class:`~.loo_td.LooTdParams` says."""
        refuse_trees(batch, "loo_td")
        number = np.empty(batch.n_trajectories, dtype=np.int64)
        number[_sorted(batch.ids["trajectory"])] = np.arange(batch.n_trajectories)
        order = np.lexsort((batch.step, number[batch.trajectory]))
        trajectory, size = batch.trajectory[order], len(order)
        _, first, group = np.unique(batch.group[order], return_index=True, return_inverse=True)
        group = np.argsort(np.argsort(first))[group.reshape(-1)]  # numbered as they come in this order
        last = np.append(trajectory[1:] != trajectory[:-1], True)[:size]
        begin = np.flatnonzero(np.append(True, last[:-1])[:size])
        length = np.diff(begin, append=size)
        position = np.arange(size) - np.repeat(begin, length)
        stopped = last & ~batch.terminated[order]

        longest = np.zeros(batch.n_groups, dtype=np.int64)
        np.maximum.at(longest, group, position + 1)
        allowed = np.full(batch.n_groups, horizon or 0)
        if horizon is None and "extra.turn_limit" in batch.given:  # 0 or none in a turn that reached no environment
            turns = np.nan_to_num(step_column(batch, "loo_td", "turn_limit", 0.0, gaps=True))[order]
            np.maximum.at(allowed, group, turns.astype(np.int64))
        everywhere = longest.max(initial=0) * (1 if stopped.any() else 2)
        inferred = np.where(np.bincount(group, stopped, batch.n_groups) > 0, longest, everywhere)
        limit = np.where(allowed > 0, np.maximum(longest, allowed), inferred)[group]
        left = limit - position

        cut = stopped & (left == 1)
        leads = ~last | cut
        following = next_anchors(batch)[order]
        following = np.where(following == TERMINAL, batch.anchor[order], following)  # unknown: back to where it was
        both, _ = joint_codes(np.tile(group, 2), np.append(batch.anchor[order], following))
        state, to = np.split(both, 2)
        reward, early = batch.reward[order], stopped & ~cut
        return cls(order, group, state, to, leads, reward, position, left, begin, length, last, cut, early)

    @property
    def n_trajectories(self) -> int:
        return len(self.begin)

    def returns(self, rewards: Floats, discount: float | Floats) -> Floats:
        """:func:`.discounted_returns` in the order of these arrays, (S,)."""
        return discounted_returns(rewards, Runs(np.arange(len(rewards)), self.begin, self.length), discount)

    @cached_property
    def visits(self) -> tuple[Ints, int]:
        """Codes of (state, trajectory) (S,), and their number."""
        return joint_codes(self.state, np.repeat(np.arange(self.n_trajectories), self.length))

    @cached_property
    def others(self) -> Floats:
        """How many other trajectories of the group were in the state (S,)."""
        first = np.unique(self.visits[0], return_index=True)[1]
        visitors = np.bincount(self.state[first], minlength=1).astype(np.float64)
        return visitors[self.state] - 1

    @cached_property
    def in_company(self) -> Bools:
        """Steps of groups with several trajectories (S,)."""
        of = self.group[self.begin]
        return np.repeat(np.bincount(of, minlength=1)[of] > 1, self.length)

    def mean_of_others(self, outcome: Floats) -> Floats:
        """Mean of ``outcome`` (n_trajectories,) over the other trajectories of the group; alone: its own."""
        of = self.group[self.begin]
        size = np.bincount(of, minlength=1)[of]
        rest = np.bincount(of, outcome, minlength=1)[of] - outcome
        return np.where(size > 1, rest / np.maximum(size - 1, 1), outcome)

    def at(self, k: int) -> tuple[Bools, Ints]:
        """The trajectories that have a step ``k``, and that step of each."""
        long = self.length > k
        return long, self.begin[long] + k


def state_values(paths: Paths, gamma: float) -> tuple[Floats, Floats]:
    """``V_L^-i(s)`` before each step, and ``gamma V_{L-1}(s')`` after it: two arrays (S,).

    One pass over the steps for each number of turns left: O(steps x turns).
    """
    s, to, n = paths.state, paths.to, int(max(paths.state.max(initial=-1), paths.to.max(initial=-1))) + 1
    visit, n_own = paths.visits
    steps, own_steps = np.bincount(s, minlength=n), np.bincount(visit, minlength=n_own)
    gain, own_gain = np.bincount(s, paths.reward, n), np.bincount(visit, paths.reward, n_own)
    tip, stays = to[paths.cut], s[paths.cut]
    tips = np.bincount(tip, minlength=n)
    # Reached at the limit alone, and no step begins there: worth what the states before it are, as if all had stayed.
    beyond = (steps == 0) & (tips > 0)
    value, before, after = np.zeros(n), np.zeros(len(s)), np.zeros(len(s))
    by_left = np.argsort(paths.left, kind="stable")
    ends = np.searchsorted(paths.left[by_left], np.arange(1, paths.left.max(initial=0) + 2))
    for turns in range(1, len(ends)):
        here = by_left[ends[turns - 1] : ends[turns]]
        ahead = np.where(paths.leads, gamma * value[to], 0.0)
        sums, own_sums = gain + np.bincount(s, ahead, n), own_gain + np.bincount(visit, ahead, n_own)
        value = sums / np.maximum(steps, 1)
        value[beyond] = np.bincount(tip, value[stays], n)[beyond] / tips[beyond]
        after[here] = ahead[here]
        before[here] = (sums[s[here]] - own_sums[visit[here]]) / np.maximum(steps[s[here]] - own_steps[visit[here]], 1)
    return before, after


def baseline(
    paths: Paths, before: Floats, start: Floats, prior: float, gamma: float, words: Floats | None
) -> tuple[Floats, Floats]:
    """``b(t)`` and ``e(t)`` of :func:`~.loo_td.loo_td`, (S,) each, forwards along each trajectory."""
    b, e = np.empty(len(before)), np.empty(len(before))
    for k in range(paths.length.max(initial=0)):
        long, row = paths.at(k)
        expected = start[long] if k == 0 else (b[row - 1] - paths.reward[row - 1]) / gamma
        if k and words is not None:
            expected = expected + words[row] - (words[row - 1] - paths.reward[row - 1]) / gamma
        b[row], e[row] = (paths.others[row] * before[row] + prior * expected) / (paths.others[row] + prior), expected
    return b, e


def _sorted(ids: list[Any]) -> list[int]:
    """The order of ``ids``; where they do not compare, that of their texts."""
    try:
        return sorted(range(len(ids)), key=ids.__getitem__)
    except TypeError:
        return sorted(range(len(ids)), key=lambda k: repr(ids[k]))
