"""dual_level: the check values, its twin, turns by ordinal, and the released code's average and lone turns."""

import naive
import numpy as np
import pytest
from estimator_cases import GAMMA, as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch, compute_credit

WEIGHTS = st.sampled_from([0.0, 0.5, 1.0])
PARAMS = {**GAMMA, "trajectory_w": WEIGHTS, "turn_w": WEIGHTS, "singleton": st.sampled_from(["zero", "score"])}


@settings(max_examples=100, deadline=None)
@given(step_rows(), st.fixed_dictionaries(PARAMS))
def test_equals_its_naive_twin(rows, params):
    assert_same_credit(
        compute_credit("dual_level", as_batch(rows), **params).advantage, naive.dual_level(rows, **params)
    )


def credit(reward, trajectory, step=None, **params):
    n = len(reward)
    batch = StepBatch(group=["g"] * n, trajectory=trajectory, step=step or range(n), reward=reward)
    return compute_credit("dual_level", batch, **params)


def test_check_values():
    """Turn rewards 1, 0 and 0, 0, averaged as in the released code."""
    got = credit([1, 0, 0, 0], list("aabb"), trajectory_w=0.5, turn_w=0.5).advantage
    np.testing.assert_allclose(got, [0.7071, 0.3536, -0.7071, -0.3536], atol=1e-4)


def test_turns_are_compared_by_their_place_in_the_trajectory():
    first = credit([0, 1, 0, 0], list("aabb"), step=[0, 1, 0, 1], trajectory_w=0.0)
    other = credit([0, 1, 0, 0], list("aabb"), step=[3, 9, 0, 4], trajectory_w=0.0)
    assert first.advantage.tolist() == other.advantage.tolist()
    np.testing.assert_allclose(first.advantage, [0.5**0.5, 0.5**0.5, -(0.5**0.5), -(0.5**0.5)], atol=1e-5)


@pytest.mark.parametrize(("singleton", "lone"), [("zero", 0.0), ("score", 2.0)])
def test_a_turn_that_no_other_member_has(singleton, lone):
    got = credit([1, 2, 0], list("aab"), trajectory_w=0.0, singleton=singleton)
    assert got.advantage[1] == lone
    assert got.returns.tolist() == [1 + 0.9 * 2, 2, 0]


@settings(max_examples=30, deadline=None)
@given(step_rows())
def test_without_the_turn_level_it_is_grpo(rows):
    batch = as_batch(rows)
    plain = compute_credit("grpo_steps", batch).advantage
    assert compute_credit("dual_level", batch, turn_w=0.0).advantage.tolist() == plain.tolist()
