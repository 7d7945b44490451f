"""Statistics of evaluations: against naive twins, published numbers, and the coverage of intervals in simulations."""

from __future__ import annotations

import math

import naive_stats as naive
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import trim_mean

from verl_turnkey.plugins.view import stats

few = settings(max_examples=25, deadline=None)
scores = st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=9)


# --- pass@k, Wilson ---------------------------------------------------------------------------------------------------


@few
@given(n=st.integers(1, 9), data=st.data())
def test_pass_at_k_counts_the_choices(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert stats.pass_at_k([c], n, k) == pytest.approx([naive.pass_at_k(c, n, k)], abs=1e-12)


def test_pass_at_k_of_many_samples_and_of_tasks_with_different_numbers():
    assert stats.pass_at_k([1000], 2000, 1000)[0] == pytest.approx(1.0)
    assert stats.pass_at_k([0, 1, 4], [4, 8, 4], 2) == pytest.approx([0.0, 0.25, 1.0])


@pytest.mark.parametrize(("solved", "samples", "k"), [([1], 4, 5), ([1], 4, 0), ([5], 4, 1), ([-1], 4, 1), ([], 4, 1)])
def test_what_has_no_pass_at_k(solved, samples, k):
    with pytest.raises(ValueError, match=r"expected|needs"):
        stats.pass_at_k(solved, samples, k)


NEWCOMBE = [  # 1998, Statistics in Medicine 17:857, table I, method 3
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0, 0.1611),
    (1, 29, 0.0061, 0.1718),
]


@pytest.mark.parametrize(("c", "n", "low", "high"), NEWCOMBE)
def test_wilson_of_the_literature(c, n, low, high):
    assert stats.wilson(c / n, n) == pytest.approx((c / n, low, high), abs=5e-5)


@few
@given(c=st.integers(0, 12), n=st.integers(12, 40), confidence=st.sampled_from([0.5, 0.9, 0.99]))
def test_wilson_inverts_the_test(c, n, confidence):
    interval = stats.wilson(c / n, n, confidence)
    assert interval[1:] == pytest.approx(naive.wilson(c / n, n, confidence), abs=1e-9)
    assert interval.low < interval.high


def test_success_counts_what_the_samples_are_worth():
    alike = stats.success([8] * 10 + [0] * 10, 8)  # every sample repeats its task: 20 samples
    assert alike[1:] == pytest.approx(stats.wilson(0.5, 20)[1:])
    free = stats.success([4] * 20, 8)  # no task differs from another: all 160
    assert free == stats.wilson(0.5, 160)
    for solved, p in ((0, 0.0), (8, 1.0)):  # nothing tells how alike they are: the tasks
        assert stats.success([solved] * 20, 8) == stats.wilson(p, 20)
    assert stats.success([3], 8) == stats.wilson(3 / 8, 1)
    means = np.array([1, 3, 6, 2]) / 8
    p = means.mean()
    effective = p * (1 - p) / (means.var(ddof=1) / 4)
    assert 4 < effective < 32
    assert stats.success([1, 3, 6, 2], 8) == stats.wilson(p, effective)


def test_the_interval_holds_what_it_says():
    """50 tasks x 8 samples whose chances differ: the mean chance lies in 95 % of the intervals, not of plain ones."""
    rng = np.random.default_rng(0)
    trials, ours, plain, boot = 300, 0, 0, 0
    for trial in range(trials):
        solved = rng.binomial(8, rng.beta(0.5, 0.5, size=50))
        _, low, high = stats.success(solved, 8)
        ours += low <= 0.5 <= high
        _, low, high = stats.wilson(solved.mean() / 8, 400)
        plain += low <= 0.5 <= high
        _, low, high = stats.bootstrap(solved / 8, resamples=400, seed=trial)
        boot += low <= 0.5 <= high
    assert ours / trials > 0.92
    assert boot / trials > 0.90
    assert plain / trials < 0.75


# --- resampling -------------------------------------------------------------------------------------------------------


def test_bootstrap_of_a_mean_is_nearly_normal():
    values = np.random.default_rng(1).normal(3, 2, size=200)
    value, low, high = stats.bootstrap(values, resamples=2000, seed=5)
    half = 1.96 * values.std() / 200**0.5
    assert value == pytest.approx(values.mean())
    assert (low, high) == pytest.approx((value - half, value + half), abs=0.03)
    assert stats.bootstrap(values, resamples=2000, seed=5) == (value, low, high)
    assert stats.bootstrap(values, resamples=2000, seed=6).low != low


def test_the_runs_of_a_task_stay_with_it():
    """Tasks of different difficulty whose runs agree: no uncertainty, which resampling tasks would claim."""
    table = np.tile([0.1, 0.5, 0.9], (4, 1))
    assert stats.bootstrap(table, resamples=50) == pytest.approx((0.5, 0.5, 0.5))
    assert stats.bootstrap(table.T, resamples=50).low < 0.5


def test_a_bootstrap_in_pieces_draws_as_many(monkeypatch):
    monkeypatch.setattr(stats, "CHUNK", 50)
    seen = []

    def mean(values, axis):
        seen.append(values.shape)
        return np.mean(values, axis=axis)

    stats.bootstrap(np.arange(8.0), mean, resamples=100)
    assert sum(shape[0] for shape in seen if len(shape) == 2) == 100
    whole = stats.improvement([1.0, 2, 3], [2.0, 3, 4], resamples=99)
    assert whole.low <= whole.value <= whole.high


@few
@given(values=scores)
def test_interquartile_mean(values):
    assert stats.interquartile_mean(values) == pytest.approx(naive.interquartile_mean(values))
    assert stats.interquartile_mean(values) == pytest.approx(trim_mean(values, 0.25))


@few
@given(runs=st.integers(1, 4), others=st.integers(1, 3), tasks=st.integers(1, 3), data=st.data())
def test_improvement(runs, others, tasks, data):
    a, b = (
        [data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=tasks, max_size=tasks)) for _ in range(number)]
        for number in (runs, others)
    )
    value, low, high = stats.improvement(a, b, resamples=20)
    assert value == pytest.approx(naive.improvement(a, b))
    assert 0 <= low <= high <= 1
    assert stats.improvement(b, a, resamples=20).value == pytest.approx(1 - value)


def test_numbers_of_rliable():
    """Agarwal et al. 2021, tests of version 1.2.0: runs x tasks."""
    x, y = np.array([[1, 2], [2, 2], [1, 1], [2, 1]]), np.array([[1, 1], [2, 2], [3, 3]])
    assert stats.bootstrap(x, stats.interquartile_mean).value == 1.5
    assert stats.bootstrap(y, stats.interquartile_mean).value == 2
    assert stats.improvement(x, y).value == pytest.approx(1 / 3)


@pytest.mark.parametrize(("a", "b"), [([], [1.0]), ([[1.0, 2]], [[1.0]]), ([[[1.0]]], [1.0])])
def test_what_cannot_be_compared(a, b):
    with pytest.raises(ValueError, match="expected"):
        stats.improvement(a, b)


# --- learning curves --------------------------------------------------------------------------------------------------


def test_area_of_curves_by_hand():
    assert stats.area([0, 10, 20], [0, 1, 1], 0, 20) == 0.75
    assert stats.area([0, 10, 20], [0, 1, 1], 0, 10) == 0.5  # the budget of the shortest curve
    assert stats.area([0, 10], [0, 1], 0, 5) == 0.25  # between two evaluations
    assert stats.area([5], [0.3], 5, 5) == 0.3
    for wrong in ([0, 10], [2, 20], [10, 0]):
        with pytest.raises(ValueError, match="increasing x"):
            stats.area(wrong, [0, 1], 1, 15)


@few
@given(heights=st.lists(st.floats(0, 1), min_size=2, max_size=6), a=st.floats(0, 0.4), b=st.floats(0.6, 1))
def test_area(heights, a, b):
    x = [float(i * i) for i in range(len(heights))]
    area = stats.area(x, heights, a * x[-1], b * x[-1])
    assert area == pytest.approx(naive.area(list(zip(x, heights, strict=True)), a * x[-1], b * x[-1]), abs=2e-3)


def test_a_level_must_hold():
    assert stats.steps_to([0, 5, 10, 15, 20], [0.2, 0.9, 0.5, 0.8, 0.9], 0.8) == 15
    assert stats.steps_to([0, 5, 10], [0.8, 0.8, 0.1], 0.8) == 0
    assert stats.steps_to([0, 5, 10], [0.2, 0.5, 0.9], 0.8) == math.inf  # the last one alone
    assert stats.steps_to([0], [0.9], 0.8) == math.inf


@pytest.mark.parametrize(
    ("costs", "summary"),
    [
        ([10, 20, 40, math.inf, math.inf], "3 of 5, median 40"),
        ([10, math.inf, math.inf], "1 of 3"),
        ([10, 20], "2 of 2, median 15"),
        ([8378.464, 12000.0], "2 of 2, median 10189"),
        ([0.5, 0.75], "2 of 2, median 0.625"),
        ([], "0 of 0"),
    ],
)
def test_runs_that_did_not_reach_it_count_as_infinite(costs, summary):
    assert stats.reached(costs) == summary
