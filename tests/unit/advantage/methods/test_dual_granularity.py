"""dual_granularity: the check values of the step term, its twin, and what a step weighs."""

import naive
import numpy as np
from estimator_cases import as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch, compute_credit

PARAMS = {"beta": st.sampled_from([0.0, 0.3, 1.0]), "weight": st.sampled_from(["tokens", "steps"])}
ROWS = st.one_of(step_rows("turn_score", "tokens"), step_rows("turn_score"))


@settings(max_examples=100, deadline=None)
@given(ROWS, st.fixed_dictionaries(PARAMS))
def test_equals_its_naive_twin(rows, params):
    got = compute_credit("dual_granularity", as_batch(rows), **params).advantage
    assert_same_credit(got, naive.dual_granularity(rows, **params))


def credit(score, tokens, **params):
    n = len(score)
    batch = StepBatch(
        group=["g"] * n,
        trajectory=[0, 0, 1][:n],
        step=range(n),
        reward=[0.0] * n,
        tokens=tokens,
        extra={"turn_score": score},
    )
    return compute_credit("dual_granularity", batch, **params)


def test_check_values():
    """Scores per token 1, 1, 1, -2 and 1, 1."""
    got = credit([1, -2, 1], [3, 1, 2], beta=1.0).advantage
    np.testing.assert_allclose(got, [0.4472, -2.2361, 0.4472], atol=1e-4)


def test_steps_may_count_once():
    got = credit([1, -2, 1], [3, 1, 2], beta=1.0, weight="steps").advantage
    np.testing.assert_allclose(got, [0.5**0.5, -(2**0.5), 0.5**0.5], atol=1e-5)
    unknown = credit([1, -2, 1], None, beta=1.0).advantage
    assert unknown.tolist() == got.tolist()


def test_a_turn_without_tokens_is_not_counted():
    assert not credit([1, -2, 1], [3, 0, 2]).advantage.any()
