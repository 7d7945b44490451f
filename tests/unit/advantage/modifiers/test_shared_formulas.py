"""Modifiers that are methods too, on another method: against their twins from that method's credit."""

import naive
import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows, with_rates
from hypothesis import given, settings
from naive.unlikeliness import unlikely

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit


def free(rows):
    return with_rates([{**row, "penalty": 0.0} for row in rows])


def both(rows, *modify, **params):
    """gigpo's credit, and it modified."""
    batch = as_batch(rows)
    return compute_credit("gigpo", batch).advantage, compute_credit("gigpo", batch, modify=modify, **params).advantage


@settings(max_examples=30)
@given(step_rows("anchor").map(free))
def test_a_grae(rows):
    base, got = both(rows, {"name": "a_grae", "alpha": 0.5})
    assert_same_credit(got, naive.a_grae(rows, base, alpha=0.5))


@settings(max_examples=30)
@given(step_rows("anchor", "answer").map(free))
def test_copo(rows):
    base, got = both(rows, {"name": "copo", "rho": 0.6, "gamma": 3.0})
    assert_same_credit(got, naive.copo(rows, base, rho=0.6, gamma=3.0))


@settings(max_examples=30)
@given(step_rows("anchor", "tokens", "entropy", "log_prob").map(free))
def test_dynamo_modulation(rows):
    base, got = both(rows, "dynamo_modulation")
    assert_same_credit(got, naive.dynamo_modulation(rows, base))


@settings(max_examples=30)
@given(step_rows("anchor", "prior").map(free))
def test_shrinkage(rows):
    base, got = both(rows, {"name": "shrinkage", "prior": "given"})
    assert_same_credit(got, naive.shrinkage(rows, base))


@settings(max_examples=30)
@given(step_rows("anchor", "tokens", "log_prob").map(free))
def test_unlikeliness(rows):
    """Step rewards change with the score, so that gigpo's returns do too."""
    _, got = both(rows, {"name": "unlikeliness", "beta": 0.5})
    expected = naive.gigpo(unlikely(rows, beta=0.5))
    assert_same_credit(got, expected)


@pytest.mark.parametrize("name", ["a_grae", "copo", "dynamo_modulation", "unlikeliness"])
def test_the_method_is_grpo_under_the_modifier(name):
    batch = StepBatch(
        group=[*"aaabbb"],
        trajectory=range(6),
        step=[0] * 6,
        reward=[1, 0, 0, 1, 1, 0],
        penalty=[0, 0.1, 0, 0, 0, 0.1],
        tokens=[3] * 6,
        extra={"answer": [*"xyzxxy"], "entropy": [0.1, 0.5, 0.9] * 2, "log_prob": [-1, -2, -3] * 2},
    )
    method = compute_credit(name, batch)
    modified = compute_credit("grpo_steps", batch, modify=[name])
    np.testing.assert_allclose(modified.advantage, method.advantage, atol=1e-12)
    assert {key for key in method.metrics if key.startswith(f"credit/{name}/")} <= modified.metrics.keys()


def test_shrinkage_keeps_its_own_state_beside_the_methods():
    batch = StepBatch(
        group=[0, 0],
        trajectory=[0, 1],
        step=[0, 0],
        reward=[1, 0],
        extra={"role": ["t", "t"], "task": ["t", "t"]},
    )
    credit = compute_credit("rae", batch, modify=["shrinkage"], state={"t": 0.0, "modify/shrinkage/t": 1.0})
    assert credit.state["modify/shrinkage/t"] == 0.75
    assert credit.state["t"] == pytest.approx(0.04875)
    assert set(credit.state) == {"t", "modify/shrinkage/t"}


def test_a_grae_reads_outcomes_as_success_rates():
    batch = StepBatch(group=[0, 0], trajectory=["a", "b"], step=[0, 0], reward=[1, 10])
    with pytest.raises(ConfigError, match=r"a_grae: expected outcomes in \[0, 1\].*got 10 for trajectory 'b'"):
        compute_credit("grpo_steps", batch, modify=["a_grae"])
