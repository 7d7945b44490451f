"""step_potential: the check values of SPAE, its twin, and what is counted over tokens."""

import naive
import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch, compute_credit
from verl_turnkey.advantage.methods.step_potential import potential, saturation_factor

PARAMS = {
    "alpha": st.sampled_from([0.0, 0.5, 1.0]),
    "xi": st.sampled_from([0.0, 0.5]),
    "saturation": st.sampled_from([0.4, 0.9]),
}
ROWS = st.one_of(step_rows("potential", "valid", "tokens"), step_rows("potential", "valid"))


@settings(max_examples=100, deadline=None)
@given(ROWS, st.fixed_dictionaries(PARAMS))
def test_equals_its_naive_twin(rows, params):
    got = compute_credit("step_potential", as_batch(rows), **params).advantage
    np.testing.assert_allclose(got, naive.step_potential(rows, **params), rtol=1e-6, atol=1e-6)


def test_check_values():
    np.testing.assert_allclose(saturation_factor(np.array([0, 1, 3]), 0.5), [1, 0.6839, 0.5249], atol=1e-4)
    np.testing.assert_allclose(potential(np.array([1.0, 0, 1]), np.array([1.0, 1, 0])), [1, -1, 0.5])


def batch(phi, reward, tokens=None, trajectory=None):
    n = len(phi)
    columns = {"trajectory": trajectory or range(n), "step": range(n), "reward": reward, "tokens": tokens}
    return StepBatch(group=["g"] * n, extra={"potential": phi}, **columns)


def test_an_example_by_hand():
    """One solved episode, saturated after its first step, and one failed: shaped 0.5, 0.5 f and -0.5, no gain."""
    got = compute_credit("step_potential", batch([0.95, 0.95, 0.0], [0, 1, 0], trajectory=list("aab")), xi=0.0)
    shaped = np.array([0.5, 0.5 * (0.5 + 0.5 * np.exp(-1)), -0.5])
    assert_same_credit(got.advantage, (shaped - shaped.mean()) / (shaped.std(ddof=1) + 1e-6))


def test_a_step_that_raises_the_potential_gains():
    got = compute_credit("step_potential", batch([0.2, 0.8, 0.3], [0, 0, 0], trajectory=list("aaa"))).advantage
    assert got[1] > got[0] > got[2]


def test_tokens_weigh():
    phi, reward = [0.2, 0.8, 0.3], [1, 0, 0]
    got = compute_credit("step_potential", batch(phi, reward, tokens=[5, 1, 2])).advantage
    assert np.sum(got * [5, 1, 2]) == pytest.approx(0, abs=1e-9)
    assert np.sum(got**2 * [5, 1, 2]) == pytest.approx(7, rel=1e-4)
