"""mc_grpo: the check value without a floor, its twin, and what the floor is for."""

import naive
import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch, compute_credit


def one_group(outcomes, **params):
    n = len(outcomes)
    batch = StepBatch(group=["g"] * n, trajectory=range(n), step=[0] * n, reward=outcomes)
    return compute_credit("mc_grpo", batch, **params)


PARAMS = {"floor": st.sampled_from([0.0, 0.6745, 2.0]), "epsilon": st.sampled_from([1e-3, 0.1])}


@settings(max_examples=80)
@given(step_rows(), st.fixed_dictionaries(PARAMS))
def test_equals_its_naive_twin(rows, params):
    assert_same_credit(compute_credit("mc_grpo", as_batch(rows), **params).advantage, naive.mc_grpo(rows, **params))


def test_the_plain_formula_is_dangerous_with_outcomes_of_0_and_1():
    credit = one_group([0, 0, 0, 0, 1], floor=0.0)
    np.testing.assert_allclose(credit.advantage, [0, 0, 0, 0, 5000], rtol=1e-12)
    assert credit.metrics["credit/share_groups_without_mad"] == 1.0
    np.testing.assert_allclose(one_group([0, 0, 0, 0, 1]).advantage, [0, 0, 0, 0, 16.521], atol=1e-3)


def test_where_outcomes_differ_the_floor_does_nothing():
    """b = 3, MAD = median of 3, 2, 0, 4, 7 = 3; four of five differ from b. The sample std is 3.6332."""
    outcomes = [0, 1, 3, 7, 10]
    by_hand = (np.array(outcomes) - 3) / 3.001 * 5 / 4
    np.testing.assert_allclose(one_group(outcomes, floor=0.0).advantage, by_hand, rtol=1e-12)
    np.testing.assert_allclose(one_group(outcomes).advantage, by_hand, rtol=1e-12)
    assert one_group(outcomes).metrics["credit/share_groups_without_mad"] == 0.0


def test_an_even_group_has_its_median_between_two():
    np.testing.assert_allclose(one_group([0, 1], floor=0.0).advantage, [-0.5 / 0.501, 0.5 / 0.501])


@pytest.mark.parametrize("outcomes", [[0.1 + 0.2, 0.3, 0.3], [1], [5, 5]])
def test_equal_outcomes_are_nothing(outcomes):
    assert one_group(outcomes, floor=0.0).advantage.tolist() == [0] * len(outcomes)
