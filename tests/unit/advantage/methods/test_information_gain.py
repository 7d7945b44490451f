"""information_gain: the check values of both pools, its twin, and logarithms."""

import naive
import numpy as np
import pytest
from estimator_cases import GAMMA, as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit

PARAMS = {
    **GAMMA,
    "gain": st.sampled_from(["probability", "log_probability"]),
    "pool": st.sampled_from(["joint", "separate"]),
}


@settings(max_examples=100, deadline=None)
@given(step_rows("gold_probability"), st.fixed_dictionaries(PARAMS))
def test_equals_its_naive_twin(rows, params):
    got = compute_credit("information_gain", as_batch(rows), **params).advantage
    assert_same_credit(got, naive.information_gain(rows, **params))


def batch(probability, outcome=(1, 0)):
    """Episode a with three turns, b with two."""
    return StepBatch(
        group=["g"] * 5,
        trajectory=list("aaabb"),
        step=[0, 1, 2, 0, 1],
        reward=[0, 0, outcome[0], 0, outcome[1]],
        extra={"gold_probability": probability},
    )


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ("separate", [2.336293, 1.267257, 0.999998, -2.336293, -0.999998]),
        ("joint", [1.476057, 1.577854, 1.934144, -1.476057, -0.610782]),
    ],
)
def test_check_values(pool, expected):
    """Gains 0.2, 0.1 and -0.1, outcomes 1 and 0."""
    got = compute_credit("information_gain", batch([0.3, 0.5, 0.6, 0.4, 0.3]), pool=pool).advantage
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_logarithms_compare_ratios():
    got = compute_credit("information_gain", batch([0.1, 0.2, 0.4, 0.5, 1.0]), pool="separate", gain="log_probability")
    np.testing.assert_allclose(got.advantage, [1, 1, 1, -1, -1], atol=1e-5)  # each gain is log 2


def test_the_probability_before_the_only_turn_is_not_read():
    alone = StepBatch(
        group=[0] * 3,
        trajectory=[0, 0, 1],
        step=[0, 1, 0],
        reward=[0, 1, 0],
        extra={"gold_probability": [0.3, 0.4, 0.0]},
    )
    got = compute_credit("information_gain", alone, gain="log_probability").advantage
    np.testing.assert_allclose(got, [1, 1, -1], atol=1e-5)


@pytest.mark.parametrize(("pool", "expected"), [("separate", [0, 0]), ("joint", [0, 1])])
def test_equal_episodes(pool, expected):
    """Gains 0.1, outcomes 1: in a joint pool they differ, and what sums to 0 but for rounding is 0."""
    twice = StepBatch(
        group=["g"] * 4,
        trajectory=list("aabb"),
        step=[0, 1] * 2,
        reward=[0, 1] * 2,
        extra={"gold_probability": [0.3, 0.4] * 2},
    )
    got = compute_credit("information_gain", twice, pool=pool).advantage
    assert got[[0, 2]].tolist() == [0, 0]
    np.testing.assert_allclose(got, expected * 2, atol=1e-5)


def test_a_logarithm_of_nothing_is_named():
    with pytest.raises(ConfigError, match=r"gold_probability above 0, got 0 in row 3, trajectory 'b', step 0"):
        compute_credit("information_gain", batch([0.3, 0.5, 0.6, 0.0, 0.3]), gain="log_probability")


@pytest.mark.parametrize("wrong", [-0.1, 1.1, None])
def test_what_is_no_probability_is_named(wrong):
    with pytest.raises(ConfigError, match=r"extra\.gold_probability: expected a finite number from 0 to 1 .* row 1"):
        compute_credit("information_gain", batch([0.5, wrong, 0.5, 0.5, 0.5]))


def test_turns_between_two_scores_share_the_gain():
    """As probe_gold with every=2 gives it: turns 1 and 3 have the probability of the turn before them."""
    gold = [0.2, 0.2, 0.6, 0.6, 0.2, 0.2, 0.3, 0.3]
    steps = StepBatch(
        group=["g"] * 8,
        trajectory=list("aaaabbbb"),
        step=[0, 1, 2, 3] * 2,
        reward=[0, 0, 0, 1] * 2,
        extra={"gold_probability": gold},
    )
    a, b = compute_credit("information_gain", steps).advantage.reshape(2, 4)
    gains = [0, 0.4, 0, 0, 0.1, 0]
    np.testing.assert_allclose(a - b, [0.3 / np.std(gains), 0.3 / np.std(gains), 0, 0], rtol=1e-4)
