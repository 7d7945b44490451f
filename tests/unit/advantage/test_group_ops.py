"""The primitives against plain loops, and at sizes where a shortcut would break."""

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage.group_ops import (
    against_others,
    discounted_returns,
    equal,
    group_stats,
    joint_codes,
    normalize,
    ordinals,
    run_sums,
    sort_runs,
)

numbers = st.floats(-1e3, 1e3, allow_nan=False)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), numbers), max_size=30), st.sampled_from(["sample", "population"]))
def test_group_stats_equal_a_loop(pairs, std):
    codes = np.array([code for code, _ in pairs], dtype=np.int64)
    values = np.array([value for _, value in pairs], dtype=np.float64)
    stats = group_stats(values, codes, 6, std)
    for code in range(6):
        members = [value for c, value in pairs if c == code]
        assert stats.size[code] == len(members)
        mean = math.fsum(members) / len(members) if members else 0.0
        assert stats.mean[code] == pytest.approx(mean, abs=1e-9)
        freedom = max(len(members) - (std == "sample"), 1)
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in members) / freedom)
        assert stats.std[code] == pytest.approx(spread, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), numbers, st.integers(0, 4)), max_size=20),
    st.sampled_from(["sample", "population"]),
    st.randoms(use_true_random=True),
)
def test_weighted_stats_are_those_of_the_repeated_values(rows, std, random):
    def columns(rows):
        return [np.array([row[k] for row in rows], dtype=dtype) for k, dtype in ((1, float), (2, int), (0, int))]

    values, weights, codes = columns(rows)
    got = group_stats(values, codes, 6, std, weights)
    expected = group_stats(np.repeat(values, weights), np.repeat(codes, weights), 6, std)
    assert got.size.tolist() == expected.size.tolist()
    np.testing.assert_allclose(got.mean, expected.mean, rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(got.std, expected.std, rtol=1e-9, atol=1e-9)
    random.shuffle(rows)
    values, weights, codes = columns(rows)
    again = group_stats(values, codes, 6, std, weights)
    assert (again.mean.tolist(), again.std.tolist()) == (got.mean.tolist(), got.std.tolist())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), numbers), max_size=20))
def test_against_others_is_the_value_less_the_mean_of_the_others(pairs):
    codes = np.array([code for code, _ in pairs], dtype=np.int64)
    values = np.array([value for _, value in pairs], dtype=np.float64)
    got = against_others(values, codes, group_stats(values, codes, 4))
    for i, (code, value) in enumerate(pairs):
        others = [v for j, (c, v) in enumerate(pairs) if c == code and j != i]
        expected = value - math.fsum(others) / len(others) if others else 0.0
        assert got[i] == pytest.approx(expected, abs=1e-8)


def test_ordinals_count_the_steps_that_are_there():
    runs = sort_runs(np.array([1, 0, 1, 1, 0]), np.array([7, 2, 3, 9, 0]))
    assert ordinals(runs).tolist() == [1, 1, 0, 2, 0]


@pytest.mark.parametrize("value", [0.1, 9.025, 8.57375, 1e-300, 1e15 + 0.3])
@pytest.mark.parametrize("n", [1, 3, 7, 100])
def test_constant_group_is_exactly_centred(value, n):
    values, codes = np.full(n, value), np.zeros(n, dtype=np.int64)
    stats = group_stats(values, codes, 1)
    assert stats.std[0] == 0
    assert not normalize(values, codes, stats, "mean", 1e-6).any()
    assert not normalize(values, codes, stats, "mean_std", 1e-6).any()


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1.0, 1.0 + 1e-13, True),
        (1.0, 1.0 + 1e-11, False),
        (0.0, 1e-13, True),
        (0.0, 1e-11, False),
        (1e6, 1e6 + 1e-7, True),
        (1e6, 1e6 + 1e-4, False),
        (-1e6, -1e6 - 1e-7, True),
    ],
)
def test_rounding_is_relative_from_one_on(a, b, same):
    """A penalty of 1e-9 or a potential's last rise is a spread; the order of a sum is none."""
    assert equal(np.array([a]), np.array([b])).tolist() == equal(np.array([b]), np.array([a])).tolist() == [same]


def test_row_without_spread_in_its_group_is_not_divided_by_epsilon():
    stats = group_stats(np.array([2.0, 2.0]), np.array([0, 0]), 1)
    outside = normalize(np.array([1.9]), np.array([0]), stats, "mean_std", 1e-6)
    assert outside.tolist() == [0.0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(numbers, min_size=1, max_size=8), max_size=6), st.floats(0, 1), st.randoms())
def test_discounted_returns_equal_the_recursion_bit_by_bit(rewards, gamma, random):
    rows = [(k, t, r) for k, run in enumerate(rewards) for t, r in enumerate(run)]
    random.shuffle(rows)
    trajectory, step = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1))
    runs = sort_runs(trajectory, step)
    got = discounted_returns(np.array([row[2] for row in rows], dtype=np.float64), runs, gamma)
    for (k, t, _), value in zip(rows, got, strict=True):
        expected = 0.0
        for r in reversed(rewards[k][t:]):
            expected = r + gamma * expected
        assert value == expected


def test_long_trajectory_neither_overflows_nor_takes_quadratic_time():
    n = 20_000
    runs = sort_runs(np.zeros(n, dtype=np.int64), np.arange(n))
    started = time.thread_time()
    returns = discounted_returns(np.ones(n), runs, 0.5)
    assert time.thread_time() - started < 2
    assert returns[0] == 2.0
    assert returns[-1] == 1.0


def test_run_sums_and_joint_codes():
    trajectory = np.array([1, 0, 1, 0])
    runs = sort_runs(trajectory, np.array([1, 0, 0, 1]))
    assert runs.order.tolist() == [1, 3, 2, 0]
    assert run_sums(np.array([1.0, 2.0, 4.0, 8.0]), runs).tolist() == [10.0, 5.0]
    codes, n = joint_codes(np.array([0, 0, 1, 0]), np.array([0, 1, 0, 0]))
    assert n == 3
    assert codes[0] == codes[3]
    assert len(set(codes.tolist())) == 3
    assert joint_codes(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))[1] == 0
