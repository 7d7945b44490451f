"""ngrpo: the check values, its twin, and what no outcome may be."""

import naive
import numpy as np
import pytest
from estimator_cases import EPSILON, as_batch, assert_same_credit, step_rows, with_rates
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit


def one_group(outcomes, **params):
    n = len(outcomes)
    return compute_credit(
        "ngrpo", StepBatch(group=["g"] * n, trajectory=range(n), step=[0] * n, reward=outcomes), **params
    )


@settings(max_examples=60)
@given(step_rows().map(with_rates), st.fixed_dictionaries({"r_max": st.sampled_from([1.0, 7.0]), **EPSILON}))
def test_equals_its_naive_twin(rows, params):
    assert_same_credit(compute_credit("ngrpo", as_batch(rows), **params).advantage, naive.ngrpo(rows, **params))


def test_check_values():
    np.testing.assert_allclose(one_group([0] * 8).advantage, [-1 / 3] * 8, atol=1e-5)
    np.testing.assert_allclose(one_group([1, 0, 0, 0]).advantage, [1.0954, *[-0.7303] * 3], atol=1e-4)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_group_that_failed_learns_and_one_that_won_does_not(n):
    np.testing.assert_allclose(one_group([0] * n).advantage, [-1 / np.sqrt(n + 1)] * n, atol=1e-5)
    assert one_group([1] * n).advantage.tolist() == [0] * n
    assert one_group([0] * n).metrics["credit/share_groups_without_r_max"] == 1.0
    assert one_group([1] * n).metrics["credit/share_groups_without_r_max"] == 0.0


def test_nothing_is_better_than_r_max():
    assert one_group([0.1 + 0.2], r_max=0.3).advantage.tolist() == [0]
    with pytest.raises(
        ConfigError, match=r"ngrpo: expected outcomes of at most r_max=1, got 10 for trajectory 1.*set r_max"
    ):
        one_group([0, 10])
    with pytest.raises(ConfigError, match=r"ngrpo\.r_max: expected a finite number, got inf"):
        one_group([0], r_max=float("inf"))
