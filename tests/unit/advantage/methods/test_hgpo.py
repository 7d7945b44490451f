"""hgpo: the reference, the hand example with both weightings, its twin, and what a level needs."""

import naive
import numpy as np
import pytest
from estimator_cases import (
    EPISODE,
    GAMMA,
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

REFERENCE = {"weights": "code", "std": "population", "scope": "steps", "singleton": "score"}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", cases("hgpo"))
def test_equals_the_reference(case, norm):
    params = case["params"]
    credit = compute_credit(
        "hgpo",
        oracle_batch(case),
        gamma=params["gamma"],
        history=params["history_length"],
        alpha=params["length_weight_alpha"],
        episode_level=params["base_group"],
        epsilon=params["epsilon"],
        norm=norm,
        **REFERENCE,
    )
    assert_rows(credit.advantage, case["expected"][NORMS[norm]]["advantages"], case, TOLERANCE[norm])
    np.testing.assert_allclose(credit.returns, case["inputs"]["step_returns"], rtol=0, atol=2e-5)


@settings(max_examples=150, deadline=None)
@given(
    step_rows("anchor"),
    st.fixed_dictionaries(
        {
            **EPISODE,
            **GAMMA,
            "history": st.sampled_from([0, 1, 2, 4, 7]),
            "alpha": st.sampled_from([0.0, 1.0, 2.5]),
            "std": st.sampled_from(["population", "sample"]),
            "weights": st.sampled_from(["paper", "code"]),
            "episode_level": st.booleans(),
        }
    ),
)
def test_equals_its_naive_twin(rows, params):
    credit = compute_credit("hgpo", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.hgpo(rows, **params))


HAND = {
    "group": ["g"] * 6,
    "trajectory": ["t0", "t0", "t1", "t1", "t2", "t2"],
    "step": [0, 1, 0, 1, 0, 1],
    "reward": [0.0, 10.0, 0.0, 0.0, 0.0, 4.0],
    "anchor": ["A", "B", "A", "B", "C", "B"],
}


def hand(**params):
    credit = compute_credit("hgpo", StepBatch(**HAND), history=1, **params)
    np.testing.assert_allclose(credit.returns, [9.5, 10, 0, 0, 3.8, 4], atol=1e-12)
    return credit.advantage


def test_hand_example_with_the_weights_of_the_code():
    """Level 0: A {9.5, 0}, B {10, 0, 4}; level 1: AB {10, 0}, and CB alone."""
    expected = [4.75, (2 * 16 / 3 + 3 * 5) / 5, -4.75, -(2 * 14 / 3 + 3 * 5) / 5, 0, -2 / 3]
    np.testing.assert_allclose(hand(norm="mean", weights="code"), expected, atol=1e-5)
    expected = [0.999999, 1.119108, -0.999999, -1.054219, 0, -0.162221]
    np.testing.assert_allclose(hand(weights="code"), expected, atol=2e-6)
    reference = {"weights": "code", "scope": "steps", "episode_level": True}
    expected = [4.944443, 5.166666, -4.722220, -4.833332, -0.666666, -0.666666]
    np.testing.assert_allclose(hand(norm="mean", **reference), expected, atol=2e-6)
    expected = [1.061565, 1.130040, -1.012203, -1.051285, -0.148087]
    np.testing.assert_allclose(hand(**reference)[:5], expected, atol=2e-6)


def test_hand_example_with_the_weights_of_the_paper():
    expected = [4.75, (16 / 3 + 2 * 5) / 3, -4.75, -(14 / 3 + 2 * 5) / 3, 0, -2 / 3]
    np.testing.assert_allclose(hand(norm="mean"), expected, atol=1e-12)
    assert hand(norm="mean")[1] == pytest.approx(5.1111, abs=1e-4)
    expected = [4.75, (16 / 3 + 5) / 2, -4.75, -(14 / 3 + 5) / 2, 0, -2 / 3]
    np.testing.assert_allclose(hand(norm="mean", alpha=0.0), expected, atol=1e-12)
    expected = [4.75, (16 / 3 + 4 * 5) / 5, -4.75, -(14 / 3 + 4 * 5) / 5, 0, -2 / 3]
    np.testing.assert_allclose(hand(norm="mean", alpha=2.0), expected, atol=1e-12)


def test_both_conventions_of_the_std():
    """Level 0 of state A: {9.5, 0}."""
    assert hand()[0] == pytest.approx(1, abs=1e-6)
    assert hand(std="sample")[0] == pytest.approx(0.5**0.5, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(step_rows("anchor"))
def test_without_history_it_is_the_step_level_of_gigpo(rows):
    batch = as_batch(rows)
    got = compute_credit("hgpo", batch, history=0, norm="mean").advantage
    both, episode = (compute_credit(name, batch, norm="mean").advantage for name in ("gigpo", "grpo_steps"))
    np.testing.assert_allclose(got, both - episode - batch.penalty, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("weights", ["paper", "code"])
def test_where_no_state_repeats_only_the_episode_level_is_left(weights):
    rows = {**HAND, "anchor": list("abcdef")}
    assert not compute_credit("hgpo", StepBatch(**rows), weights=weights).advantage.any()
    got = compute_credit("hgpo", StepBatch(**rows), weights=weights, episode_level=True).advantage
    np.testing.assert_allclose(got, compute_credit("grpo_steps", StepBatch(**rows)).advantage, rtol=2e-6)


def test_a_level_without_signal_takes_no_weight():
    """Both trajectories come to B over A and gain the same there; a third one that comes over C gains less."""
    rows = {**HAND, "reward": [0.0, 10.0, 0.0, 10.0, 0.0, 4.0]}
    got = compute_credit("hgpo", StepBatch(**rows), history=1, norm="mean").advantage
    np.testing.assert_allclose(got, [0, 2, 0, 2, 0, -4], atol=1e-12)


def test_a_step_that_is_average_but_for_rounding_has_no_say_at_that_level():
    """B is left with 0.1, 0.2 and 0.3, whose mean in floats is not 0.2; after A with 0.2 and 0.3."""
    rows = {
        "group": ["g"] * 5,
        "trajectory": ["t0", "t1", "t1", "t2", "t2"],
        "step": [1, 0, 1, 0, 1],
        "reward": [0.1, 0.0, 0.2, 0.0, 0.3],
        "anchor": ["B", "A", "B", "A", "B"],
    }
    assert 0.2 - (0.1 + 0.2 + 0.3) / 3 != 0, "or this shows nothing"
    got = compute_credit("hgpo", StepBatch(**rows), history=1, norm="mean").advantage
    np.testing.assert_allclose(got[2], -0.05, atol=1e-12)


def test_none_breaks_the_contexts_it_is_in_and_no_other():
    rows = {
        "group": ["g"] * 6,
        "trajectory": ["t0"] * 3 + ["t1"] * 3,
        "step": [0, 1, 2] * 2,
        "reward": [0.0, 0.0, 10.0, 0.0, 0.0, 0.0],
    }

    def credit(anchor, **params):
        batch = StepBatch(**rows, anchor=anchor)
        return compute_credit("hgpo", batch, norm="mean", gamma=1.0, **params).advantage.round(12).tolist()

    assert credit([None, "B", "C", None, "B", "C"], history=2) == [0, 5, 5, 0, -5, -5]
    assert credit(["A", None, "C", "A", None, "C"], history=2) == [5, 0, 5, -5, 0, -5]
    assert credit([None] * 6) == [0] * 6


def test_a_context_ends_at_the_trajectory_and_at_the_group():
    """The last B has no predecessor, so only level 0 compares it; equal states of two groups never meet."""
    rows = {
        "group": ["g"] * 4,
        "trajectory": ["t0", "t0", "t1", "t2"],
        "step": [0, 1, 0, 0],
        "reward": [0.0, 10.0, 0.0, 4.0],
        "anchor": ["A", "B", "A", "B"],
    }
    got = compute_credit("hgpo", StepBatch(**rows), history=1, norm="mean").advantage
    np.testing.assert_allclose(got, [4.75, 3, -4.75, -3], atol=1e-12)
    apart = {**rows, "group": ["g", "g", "h", "i"]}
    assert not compute_credit("hgpo", StepBatch(**apart), history=1).advantage.any()


def test_the_window_goes_over_the_steps_present_in_step_order():
    """Steps 7 and 3 without 4, 5, 6, and rows out of order: 3 is the predecessor of 7."""
    order = [3, 0, 5, 1, 4, 2]
    rows = {name: [column[i] for i in order] for name, column in HAND.items()}
    rows["step"] = [7 if step else 3 for step in rows["step"]]
    got = compute_credit("hgpo", StepBatch(**rows), history=1, norm="mean").advantage
    assert got.tolist() == hand(norm="mean")[order].tolist()
