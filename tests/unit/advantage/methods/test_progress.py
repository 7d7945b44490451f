"""progress: the check values of PAV, VinePPO as its case without a prover, and its twin."""

import naive
import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit

PARAMS = {
    "alpha": st.sampled_from([0.0, 0.5, 3.0]),
    "prover": st.sampled_from(["given", "best_of_k"]),
    "k": st.sampled_from([1, 4]),
    "whiten": st.sampled_from(["none", "turns"]),
}
ROWS = st.one_of(step_rows("turn_value", "prover_value"), step_rows("turn_value"))


@settings(max_examples=100, deadline=None)
@given(ROWS, st.fixed_dictionaries(PARAMS))
def test_equals_its_naive_twin(rows, params):
    got = compute_credit("progress", as_batch(rows), **params).advantage
    assert_same_credit(got, naive.progress(rows, **params))


def measured(rows, wanted):
    """``wanted`` says of each row in turn, from the first one again, whether its state was measured."""
    return [{**row, "value_rollouts": float(wanted[i % len(wanted)])} for i, row in enumerate(rows)]


@settings(max_examples=100, deadline=None)
@given(ROWS, st.fixed_dictionaries(PARAMS), st.lists(st.sampled_from([0, 0, 1, 9]), min_size=1, max_size=7))
def test_equals_its_naive_twin_over_segments(rows, params, wanted):
    rows = measured(rows, wanted)
    got = compute_credit("progress", as_batch(rows), segments=True, **params).advantage
    assert_same_credit(got, naive.progress(rows, segments=True, **params))


def test_every_step_of_a_segment_gets_what_the_segment_adds():
    """SPO's chain: before turns 1 and 3 of four; 0 before the first cut, whose value is filled in."""
    value = [0.4, 0.4, 0.4, 0.7]
    batch = StepBatch(
        group=["g"] * 4,
        trajectory=[0] * 4,
        step=range(4),
        reward=[0, 0, 0, 1],
        extra={"turn_value": value, "value_rollouts": [0, 9, 0, 9]},
    )
    got = compute_credit("progress", batch, alpha=0.0, segments=True).advantage
    np.testing.assert_allclose(got, [0.0, 0.3, 0.3, 0.3], atol=1e-12)
    with pytest.raises(ConfigError, match=r"extra\.value_rollouts"):
        credit([1], [0.5], segments=True)


def credit(reward, value, **params):
    n = len(reward)
    extra = {"turn_value": value, "prover_value": params.pop("prover_value", None)}
    columns = {"trajectory": [0] * n, "step": range(n), "reward": reward}
    return compute_credit("progress", StepBatch(group=["g"] * n, extra=extra, **columns), **params).advantage


def test_check_values():
    """The policy's value rises from 0.2 to 0.5: A_mu 0.3471; the effective reward Q_pi + 5 A_mu is 2.2355."""
    alone, both = (credit([0, 1], [0.2, 0.5], alpha=alpha, prover="best_of_k")[0] for alpha in (0.0, 5.0))
    assert alone == pytest.approx(0.5 - 0.2)
    assert (both - alone) / 5 == pytest.approx(0.3471, abs=1e-4)
    assert both + 0.2 == pytest.approx(2.2355, abs=1e-4)


def test_whitened_parts_add_up_and_the_penalty_is_not_whitened():
    """VinePPO's advantages 0.3, 0.15 and 0.6 have mean 0.35 and deviation 0.2291."""
    columns = {"group": ["g"] * 3, "trajectory": [0] * 3, "step": range(3), "reward": [0, 0.25, 1]}
    batch = StepBatch(**columns, penalty=[0, 0, 0.5], extra={"turn_value": [0.2, 0.5, 0.4]})
    got = compute_credit("progress", batch, alpha=0.0, whiten="turns")
    np.testing.assert_allclose(got.advantage, [-0.2182, -0.8729, 1.0911 - 0.5], atol=1e-4)
    np.testing.assert_allclose(sum(got.parts.values()), got.advantage, atol=1e-12)
    both = compute_credit("progress", batch, whiten="turns")
    np.testing.assert_allclose(both.advantage, got.advantage, atol=1e-7)  # four times as large, before it is whitened


def test_without_a_prover_it_is_vineppo():
    np.testing.assert_allclose(credit([0, 0.25, 1], [0.2, 0.5, 0.4], alpha=0.0), [0.3, 0.15, 0.6], atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(step_rows("turn_value"))
def test_a_trajectory_adds_up_to_what_was_not_expected(rows):
    batch = as_batch([{**row, "penalty": 0.0} for row in rows])
    got = compute_credit("progress", batch, alpha=0.0).advantage
    first = batch.extra["turn_value"][batch.first_rows]
    total, reward = (np.bincount(batch.trajectory, weights=column) for column in (got, batch.reward))
    np.testing.assert_allclose(total, reward - first, atol=1e-8)


def test_a_prover_of_its_own():
    got = credit([0, 1], [0.2, 0.5], prover_value=[0.1, 0.9], alpha=2.0)
    np.testing.assert_allclose(got, [0.3 + 2 * 0.8, 0.5 + 2 * 0.1], atol=1e-12)
    same = credit([0, 1], [0.2, 0.5], alpha=2.0)
    np.testing.assert_allclose(same, [3 * 0.3, 3 * 0.5], atol=1e-12)


def test_best_of_k_takes_probabilities():
    with pytest.raises(ConfigError, match=r"progress: extra\.turn_value: expected a finite number from 0 to 1"):
        credit([1], [1.5], prover="best_of_k")
    assert np.isfinite(credit([1], [1.5])).all()


def test_where_states_are_left_out_every_step_of_a_segment_gets_its_credit():
    """Two turns, of which the first decides: measured at every turn, or before the first alone."""

    def table(values, rollouts):
        extra = {"turn_value": values} | ({} if rollouts is None else {"value_rollouts": rollouts})
        return StepBatch(group=[0] * 2, trajectory=[0] * 2, step=[0, 1], reward=[0.0, 1.0], extra=extra)

    every, half = table([0.5, 1.0], [9, 9]), table([0.5, 0.5], [9, 0])
    assert compute_credit("progress", every, alpha=0).advantage.tolist() == [0.5, 0.0]
    assert compute_credit("progress", half, alpha=0).advantage.tolist() == [0.5, 0.5]
    assert compute_credit("progress", half, alpha=0, segments=False).advantage.tolist() == [0.0, 0.5]
    # An environment's own estimates say nothing of rollouts: each step stands for itself.
    assert compute_credit("progress", table([0.5, 0.5], None), alpha=0).advantage.tolist() == [0.0, 0.5]
