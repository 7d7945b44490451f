"""siblings: the check values, its twin, and columns that are none."""

import naive
import numpy as np
import pytest
from estimator_cases import NORM, as_batch, assert_same_credit, step_rows, with_parents
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit


@settings(max_examples=60, deadline=None)
@given(step_rows("action", "candidate_score").map(with_parents), st.fixed_dictionaries(NORM))
def test_equals_its_naive_twin(rows, params):
    credit = compute_credit("siblings", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.siblings(rows, **params))


def credit(parent, scores, group=None, **columns):
    n = len(scores)
    batch = StepBatch(
        group=[0] * n if group is None else group,
        trajectory=range(n),
        step=[0] * n,
        reward=[0] * n,
        extra={"parent": parent, "candidate_score": scores},
        **columns,
    )
    return compute_credit("siblings", batch).advantage


def test_check_values_of_slate():
    got = credit(["start"] * 5, [2, 1, 0, 0, -1])
    np.testing.assert_allclose(got, [1.4033, 0.5262, -0.3508, -0.3508, -1.2279], atol=1e-4)


def test_only_candidates_for_the_same_turn_of_the_same_group_are_compared():
    got = credit([*"xxyzx"], [1, 0, 7, 3, 9], group=[0, 0, 0, 0, 1])
    np.testing.assert_allclose(got, [0.5**0.5, -(0.5**0.5), 0, 0, 0], atol=1e-5)
    assert credit(["x"] * 3, [0.1, 0.1, 0.1], penalty=[0, 0.5, 0]).tolist() == [0, -0.5, 0]


def test_every_step_has_a_key_and_a_score():
    with pytest.raises(ConfigError, match=r"extra\.parent: row 1 has no key"):
        credit(["x", None], [1, 2])
    with pytest.raises(ConfigError, match=r"extra\.candidate_score: expected a finite number"):
        credit(["x", "x"], [1, float("nan")])
