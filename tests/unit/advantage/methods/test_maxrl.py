"""maxrl: the check values, its twin, and means that are no scale."""

import naive
import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch, compute_credit


def credit(outcomes, **params):
    n = len(outcomes)
    batch = StepBatch(group=["g"] * n, trajectory=range(n), step=[0] * n, reward=outcomes)
    return compute_credit("maxrl", batch, **params).advantage


#: Sums of several rewards are 0 but for rounding.
NOISE = 0.1 + 0.2 - 0.3


@settings(max_examples=100, deadline=None)
@given(
    step_rows(),
    st.fixed_dictionaries({"epsilon": st.sampled_from([0.0, 1e-6]), "singleton": st.sampled_from(["zero", "score"])}),
)
def test_equals_its_naive_twin(rows, params):
    assert_same_credit(compute_credit("maxrl", as_batch(rows), **params).advantage, naive.maxrl(rows, **params))


def test_check_values():
    np.testing.assert_allclose(credit([1, 0, 0, 0]), [3, -1, -1, -1], atol=1e-12)
    np.testing.assert_allclose(credit([1, 0, 0, 0], epsilon=1e-6), [2.999988, *[-0.999996] * 3], atol=1e-6)
    np.testing.assert_allclose(credit([1, 0.5, 0]), [1, 0, -1], atol=1e-12)


@pytest.mark.parametrize("outcomes", [[0, 0], [1, 1, 1], [0.1 + 0.2, 0.3], [NOISE, 0, 0], [-NOISE, 0]])
def test_without_a_success_or_a_difference_there_is_nothing_to_learn(outcomes):
    assert credit(outcomes).tolist() == [0] * len(outcomes)


@pytest.mark.parametrize("outcomes", [[0.1, 0.2, -0.3], [1, -1], [0, -1], [-1, -3], [1, 1, 1, -0.5]])
def test_a_group_with_a_negative_outcome_has_no_scale(outcomes):
    """Its mean may be anything: rounding noise, negative, or small because failures were punished hard."""
    assert credit(outcomes).tolist() == [0] * len(outcomes)


def test_a_zero_that_is_negative_by_rounding_is_a_failure():
    np.testing.assert_allclose(credit([1, -NOISE]), [1, -1], atol=1e-12)


def test_the_metrics_say_which_groups_teach_nothing():
    batch = StepBatch(group=[*"aabbccdd"], trajectory=range(8), step=[0] * 8, reward=[1, 0, 0, NOISE, 2, -1, -1, 0])
    metrics = compute_credit("maxrl", batch).metrics
    assert metrics["credit/share_groups_without_success"] == 0.25
    assert metrics["credit/share_groups_with_negative_outcomes"] == 0.5


@pytest.mark.parametrize("k", [1, 3, 7])
def test_a_success_weighs_the_more_the_rarer_it_is(k):
    got = credit([1] * k + [0] * (8 - k))
    np.testing.assert_allclose(got, [(8 - k) / k] * k + [-1] * (8 - k), atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(step_rows(), st.sampled_from([0.5, 2.0, 1024.0]))
def test_the_scale_of_the_rewards_does_not_matter(rows, scale):
    free = [{**row, "penalty": 0.0} for row in rows]
    scaled = [{key: v * scale if key in ("reward", "score") else v for key, v in row.items()} for row in free]
    unscaled, other = (compute_credit("maxrl", as_batch(x)).advantage for x in (free, scaled))
    np.testing.assert_allclose(other, unscaled, rtol=1e-9, atol=1e-9)
