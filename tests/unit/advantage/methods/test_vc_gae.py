"""vc_gae: the check values, its twin, and its relation to turn_gae."""

import naive
import numpy as np
import pytest
from estimator_cases import GAMMA, as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from naive.vc_gae import vc_gae_returns

from verl_turnkey.advantage import StepBatch, compute_credit

LAM = st.sampled_from([0.0, 0.9, 0.95, 1.0])


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(step_rows("value", ends=True), step_rows("value", "tokens", ends=True)),
    st.fixed_dictionaries(
        {
            **GAMMA,
            "lam_actor": LAM,
            "length_alpha": st.sampled_from([None, None, 0.05, 0.5, 2.0]),
            "lam_critic": LAM,
            "whiten": st.sampled_from(["turns", "none"]),
        }
    ),
)
def test_equals_its_naive_twin(rows, params):
    credit = compute_credit("vc_gae", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.vc_gae(rows, **params))
    assert_same_credit(credit.returns, vc_gae_returns(rows, params["gamma"], params["lam_critic"]))


CHECK = {
    "group": ["g"] * 3,
    "trajectory": ["t"] * 3,
    "step": [0, 1, 2],
    "reward": [0.0, 0.0, 1.0],
    "value": [0.5, 0.5, 0.5],
}


def test_check_values():
    """The end is worth 0, whatever stopped the episode."""
    for how in ({}, {"terminated": [False, False, True]}, {"truncated": [False, False, True]}):
        credit = compute_credit("vc_gae", StepBatch(**CHECK, **how), whiten="none")
        np.testing.assert_allclose(credit.advantage, [0.45125, 0.475, 0.5], atol=1e-12)
        np.testing.assert_allclose(credit.returns, [1, 1, 1], atol=1e-12)


def test_check_values_whitened():
    credit = compute_credit("vc_gae", StepBatch(**CHECK))
    np.testing.assert_allclose(credit.advantage, (np.array([0.45125, 0.475, 0.5]) - 0.4754167) / 0.0243777, atol=1e-3)
    np.testing.assert_allclose(credit.returns, [1, 1, 1], atol=1e-12)


def test_each_lambda_has_its_own_output():
    credit = compute_credit("vc_gae", StepBatch(**CHECK), lam_actor=1.0, lam_critic=0.0, whiten="none")
    np.testing.assert_allclose(credit.advantage, [0.5, 0.5, 0.5], atol=1e-12)
    np.testing.assert_allclose(credit.returns, [0.5, 0.5, 1], atol=1e-12)


def test_penalty_stays_on_its_own_turn():
    credit = compute_credit("vc_gae", StepBatch(**CHECK, penalty=[0.0, 0.1, 0.0]), whiten="none")
    np.testing.assert_allclose(credit.advantage, [0.45125, 0.375, 0.5], atol=1e-12)
    np.testing.assert_allclose(credit.returns, [1, 0.9, 1], atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(step_rows("value", "tokens", ends=True), LAM, st.sampled_from(["turns", "none"]))
def test_with_equal_lambdas_it_is_turn_gae(rows, lam, whiten):
    batch = as_batch(rows)
    ours = compute_credit("vc_gae", batch, gamma=0.99, lam_actor=lam, lam_critic=lam, whiten=whiten)
    theirs = compute_credit("turn_gae", batch, gamma=0.99, lam=lam, whiten=whiten)
    assert_same_credit(ours.advantage, theirs.advantage)
    assert_same_credit(ours.returns, theirs.returns)


def test_the_lambda_of_an_episode_follows_its_length():
    """VAPO's rule over turns: alpha 0.5 and 3 turns give lambda 1/3, 1 turn gives 0; the targets keep lambda 1."""
    values = [0.2, 0.4, 0.6]
    rows = {
        "group": ["g"] * 4,
        "trajectory": [*"ttt", "u"],
        "step": [0, 1, 2, 0],
        "reward": [0.0, 0.0, 1.0, 1.0],
        "value": [*values, 0.25],
    }
    credit = compute_credit("vc_gae", StepBatch(**rows), length_alpha=0.5, whiten="none")
    np.testing.assert_allclose(credit.advantage, [0.311111, 0.333333, 0.4, 0.75], atol=1e-6)
    np.testing.assert_allclose(credit.returns, [1, 1, 1, 1], atol=1e-12)


@pytest.mark.parametrize(("turns", "lam"), [(15, 0.0), (20, 0.0), (50, 0.6), (100, 0.8), (1000, 0.98)])
def test_lambda_at_alpha_of_the_paper(turns, lam):
    """At alpha 0.05, an episode of 20 or fewer has none: its advantage is that of one step. V is 0 but for the end."""
    value = [0.0] * (turns - 1) + [0.5]
    rows = {"group": [0] * turns, "trajectory": [0] * turns, "step": range(turns), "reward": [0.0] * turns}
    got = compute_credit("vc_gae", StepBatch(**rows, value=value), length_alpha=0.05, whiten="none").advantage
    np.testing.assert_allclose(got[-3:], [lam * (0.5 - lam * 0.5), 0.5 - lam * 0.5, -0.5], atol=1e-12)


def test_targets_that_differ_by_rounding_have_no_variance_to_explain():
    """Nobody won: every target is 0, give or take 1e-17."""
    rows = {**CHECK, "reward": [0.0, 0.0, 0.0], "value": [0.1, 0.7, 0.3]}
    credit = compute_credit("vc_gae", StepBatch(**rows))
    assert credit.returns is not None
    assert 0 < np.abs(credit.returns).max() < 1e-15, "or this shows nothing"
    assert credit.metrics.get("credit/explained_variance", 0.0) == 0.0


def test_without_a_critic():
    with pytest.raises(ValueError, match="value"):
        compute_credit("vc_gae", StepBatch(**{**CHECK, "value": [0.5, float("nan"), 0.5]}))
