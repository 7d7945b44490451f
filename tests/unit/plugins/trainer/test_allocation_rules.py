"""How episodes are divided among tasks: closed forms, a naive loop, and all divisions that there are."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from verl_turnkey.plugins.trainer.groups import FARTHEST, RULES, TaskHistory, by_prior, by_variance, hint_share, learn


def history(share: float, surprise: float = 0.0) -> TaskHistory:
    return TaskHistory(8.0, 8 * share, surprise)


def test_what_is_remembered_of_a_task():
    first = learn(None, [1, 0, 0, 0], 1.0)
    assert first == TaskHistory(4, 1, FARTHEST)
    # V = 0.25 and m = 1 are -0.5 and 1 in V_0.5's scale; k = 4
    assert learn(first, [1, 1, 1, 1], 1.0) == TaskHistory(8, 5, 1.5**2 - 1 / 4)
    assert learn(first, [1, 0, 0, 0], 0.5) == TaskHistory(6, 1.5, 0.0)
    assert learn(first, [1, 1], 0.0) == TaskHistory(2, 2, 1.5**2 - 1 / 2)


def test_hints_of_tasks_that_nobody_solved_last_time():
    """Shares of failures so far: 1, then 6 of 8; every other group has no hint."""
    never = learn(None, [0, 0, 0, 0], 1.0)
    assert never == TaskHistory(4, 0, FARTHEST, unsolved=1)
    assert hint_share(never, 0.25, 0.75) == 0.75
    assert hint_share(never._replace(unsolved=0.0), 0.25, 0.75) == 0
    again = learn(learn(None, [1, 1, 0, 0], 1.0), [0, 0, 0, 0], 1.0)
    assert hint_share(again, 0.25, 0.75) == 0.25 + 0.5 * 6 / 8
    assert hint_share(learn(again, [0, 0.5], 1.0), 0.25, 0.75) == 0
    assert hint_share(None, 0.25, 0.75) == 0


def test_variance_by_hand():
    """Weights 1, 1, 0.75, 0.01 (solved), 0.01 (never solved): 30 above the least are 10.8, 10.8, 8.1, 0.1, 0.1."""
    tasks = [None, history(0.5), history(0.25), history(0.875), history(0.0)]
    assert by_variance(tasks, 5 * 8, 2, 30) == [13, 13, 10, 2, 2]
    assert by_variance(tasks, 5 * 8, 2, 12) == [12, 12, 12, 2, 2]
    assert by_variance(tasks, 5 * 8, 2, 11) == [11, 11, 11, 4, 3]


def naive(tasks: list[TaskHistory | None], total: int, low: int, high: int) -> list[int]:
    """Rounds of shares in exact fractions; a share is cut where its task is full, and the next round divides that."""
    counts = [low] * len(tasks)
    while sum(counts) < total:
        left, weight = total - sum(counts), {}
        for i, task in enumerate(tasks):
            if counts[i] < high:
                p = Fraction(task.solved) / Fraction(task.episodes) if task else Fraction(1, 2)
                weight[i] = Fraction(0.01) if p >= Fraction(0.85) else max(Fraction(0.01), 4 * p * (1 - p))
        share = {i: left * w / sum(weight.values()) for i, w in weight.items()}
        whole = {i: int(s) for i, s in share.items()}
        for i in sorted(share, key=lambda i: (whole[i] - share[i], i))[: left - sum(whole.values())]:
            whole[i] += 1
        for i in whole:
            counts[i] = min(high, counts[i] + whole[i])
    return counts


@pytest.mark.parametrize("seed", range(20))
def test_variance_like_a_loop(seed):
    rng = np.random.default_rng(seed)
    tasks = [
        None if rng.random() < 0.2 else TaskHistory(16.0, float(k), 0.0)
        for k in rng.integers(0, 17, rng.integers(1, 40))
    ]
    assert by_variance(tasks, 16 * len(tasks), 8, 24) == naive(tasks, 16 * len(tasks), 8, 24)


@pytest.mark.parametrize("seed", range(5))
def test_prior_is_the_best_of_all_divisions(seed):
    """V_0.5's error with its own weight w, summed over the tasks."""
    rng = np.random.default_rng(seed)
    tasks = [history(0.5, float(d)) for d in rng.uniform(0, FARTHEST, 4)]

    def error(counts: tuple[int, ...]) -> float:
        total = 0.0
        for k, task in zip(counts, tasks, strict=True):
            w = task.surprise / (task.surprise + 1 / k)
            total += w**2 / k + (1 - w) ** 2 * task.surprise
        return total

    divisions = [c for c in itertools.product(range(2, 9), repeat=4) if sum(c) == 16]
    assert error(tuple(by_prior(tasks, 16, 2, 8))) == pytest.approx(min(map(error, divisions)), abs=1e-12)


def test_prior_at_its_edges():
    assert by_prior([history(0.5)] * 3, 12, 2, 8) == [4, 4, 4]  # nothing surprised: all alike
    assert by_prior([history(1.0, 0.0), None, history(0.0, 0.0)], 12, 2, 8) == [2, 8, 2]
    assert by_prior([history(1.0, 0.0), None, history(0.0, 0.0)], 14, 2, 8) == [3, 8, 3]


@pytest.mark.parametrize("rule", RULES.values())
def test_one_task_and_narrow_bounds(rule):
    assert rule([None], 4, 2, 8) == [4]
    assert sorted(rule([history(0.0, 0.0)] * 3, 11, 3, 4)) == [3, 4, 4]
