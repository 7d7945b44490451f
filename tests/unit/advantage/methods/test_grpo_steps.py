"""grpo_steps: the reference, its twin, groups of one and rounding."""

import naive
import numpy as np
import pytest
from estimator_cases import (
    EPISODE,
    NORMS,
    TOLERANCE,
    as_batch,
    assert_rows,
    assert_same_credit,
    cases,
    oracle_batch,
    step_rows,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch, compute_credit


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scope", ["steps", "trajectories"])
@pytest.mark.parametrize("case", cases("baselines_grpo_rloo"))
def test_equals_the_reference(case, scope, norm):
    statistics = {"steps": "cross_step_stats", "trajectories": "per_trajectory_stats"}[scope]
    expected = case["expected"][statistics][{"mean_std": "grpo_std", "mean": "grpo_nostd"}[norm]]
    credit = compute_credit("grpo_steps", oracle_batch(case), scope=scope, norm=norm, singleton="score")
    assert_rows(credit.advantage, expected, case, TOLERANCE[norm])


@settings(max_examples=100, deadline=None)
@given(step_rows(), st.fixed_dictionaries(EPISODE))
def test_equals_its_naive_twin(rows, params):
    credit = compute_credit("grpo_steps", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.grpo_steps(rows, **params))


def test_late_penalty_in_a_group_without_signal_is_not_blown_up():
    """All trajectories failed, one later step was invalid: its deviation must not be divided by epsilon alone."""
    rows = {"group": ["g"] * 4, "trajectory": ["a", "a", "b", "b"], "step": [0, 1, 0, 1], "reward": [0.0] * 4}
    batch = StepBatch(**rows, penalty=[0, 0.1, 0, 0])
    assert compute_credit("grpo_steps", batch, scope="trajectories").advantage.tolist() == [0, 0, 0, 0]
    assert compute_credit("grpo_steps", batch, scope="trajectories", norm="mean").advantage.tolist() == [0, -0.1, 0, 0]


def test_rounding_is_no_spread():
    """Nobody gained anything, but a sum says 5e-17; a penalised row would be -1e5 standard deviations away."""
    batch = StepBatch(
        group=["g"] * 4,
        trajectory=["t0", "t0", "t0", "t1"],
        step=[0, 1, 2, 0],
        reward=[0.1, 0.2, -0.3, 0.0],
        penalty=[0.0, 0.1, 0.0, 0.0],
    )
    assert 0 < batch.score[0] < 1e-16, "or this shows nothing"
    assert not compute_credit("grpo_steps", batch, scope="trajectories").advantage.any()
    assert compute_credit("grpo_steps", batch).advantage.tolist() == [0, -0.1, 0, 0]


def test_hand_example():
    batch = StepBatch(group=["g"] * 3, trajectory=["a", "a", "b"], step=[0, 1, 0], reward=[0.0, 10.0, 0.0])
    np.testing.assert_allclose(compute_credit("grpo_steps", batch).advantage, np.array([1, 1, -1]) / 2**0.5, atol=1e-6)
    np.testing.assert_allclose(
        compute_credit("grpo_steps", batch, scope="steps").advantage, np.array([1, 1, -2]) / 3**0.5, atol=1e-6
    )
