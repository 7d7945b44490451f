"""empg: the check values, its twin, and steps without an entropy."""

import naive
import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit


def with_gaps(rows):
    return [{**row, "entropy": None if row["step"] == 3 else row["entropy"]} for row in rows]


ROWS = step_rows("entropy").map(with_gaps)


def episodes(entropy, score=(1, 1, -1, -1)):
    """Two groups of two episodes; episodes 0 and 1 have two steps each, and rloo_steps gives them ``score``."""
    return StepBatch(
        group=["a", "a", "b", "b", "a", "b"],
        trajectory=[0, 0, 1, 1, 2, 3],
        step=[0, 1, 0, 1, 0, 0],
        reward=[0] * 6,
        score=[*score, 0, 0],
        extra={"entropy": [*entropy, None, None]},
    )


def test_check_values():
    """The four steps alone: base 1 1 -1 -1 from groups of one."""
    batch = StepBatch(
        group=[0, 0, 1, 1],
        trajectory=[0, 0, 1, 1],
        step=[0, 1, 0, 1],
        reward=[0] * 4,
        score=[1, 1, -1, -1],
        extra={"entropy": [0.2, 0.8, 0.5, 1.4]},
    )
    credit = compute_credit("grpo_steps", batch, modify=["empg"], singleton="score")
    np.testing.assert_allclose(credit.advantage, [1.322119, 0.689814, -1.286076, -0.725857], atol=1e-6)
    assert credit.metrics["credit/empg/gain/max"] == pytest.approx(1.452849, abs=1e-6)


@settings(max_examples=60)
@given(ROWS, st.fixed_dictionaries({"k": st.sampled_from([0.0, 1.0, 3.0]), "zeta": st.sampled_from([0.0, 0.1])}))
def test_equals_its_naive_twin(rows, params):
    free = [{**row, "penalty": 0.0} for row in rows]
    base = compute_credit("grpo_steps", as_batch(free)).advantage
    got = compute_credit("grpo_steps", as_batch(free), modify=[{"name": "empg", **params}]).advantage
    assert_same_credit(got, naive.empg(free, base, **params))


def test_a_step_without_an_entropy_keeps_its_weight_and_the_one_before_gets_no_bonus():
    got = compute_credit("grpo_steps", episodes([0.5, None, 0.5, 0.5]), modify=["empg"], norm="mean").advantage
    raw = np.array([0.5, 0.5, -0.5 + 0.1, -0.5, -0.5, 0.5])
    np.testing.assert_allclose(got, raw - raw.mean(), atol=1e-7)


def test_equal_outcomes_are_not_nothing():
    got = compute_credit("grpo_steps", episodes([0.2, 0.4, 0.2, 0.8], score=[0] * 4), modify=["empg"]).advantage
    np.testing.assert_allclose(got.sum(), 0, atol=1e-12)
    assert got[0] > got[2] > got[1] == got[3]


def test_values():
    with pytest.raises(ConfigError, match=r"empg: extra\.entropy: expected a finite number"):
        compute_credit("grpo_steps", episodes([np.inf, 0, 0, 0]), modify=["empg"])
    for key in ("k", "k_next", "zeta"):
        with pytest.raises(ConfigError, match=rf"modify\[0\] \(empg\)\.{key}: expected a finite number >= 0, got -1"):
            compute_credit("grpo_steps", episodes([0] * 4), modify=[{"name": "empg", key: -1.0}])
