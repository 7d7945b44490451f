"""Modifiers whose formula is a method's, on another method: against their twins, from any base."""

import naive
import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows
from hypothesis import given, settings

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit


def rates(rows):
    """The rows without penalties, and with outcomes in [0, 1]."""
    return [{**row, "penalty": 0.0, "score": min(1.0, max(0.0, row["reward"]))} for row in rows]


@settings(max_examples=40)
@given(step_rows("anchor").map(rates))
def test_a_grae(rows):
    base = compute_credit("gigpo", as_batch(rows)).advantage
    got = compute_credit("gigpo", as_batch(rows), modify=[{"name": "a_grae", "alpha": 0.5}]).advantage
    assert_same_credit(got, naive.a_grae(rows, base, alpha=0.5))


def test_a_grae_check_values():
    """w = 0.5, and p = 0.25 in the first group."""
    rewards = [1, 0, 0, 0, 1, 1, 1, 0]
    batch = StepBatch(group=[*"aaaabbbb"], trajectory=range(8), step=[0] * 8, reward=rewards)
    for alpha, first in ((1.0, 0.5915), (0.5, 1.1830)):
        got = compute_credit("grpo_steps", batch, modify=[{"name": "a_grae", "alpha": alpha}]).advantage
        np.testing.assert_allclose(got[:4], [first, -0.3943, -0.3943, -0.3943], atol=1e-4)


def test_a_grae_reads_outcomes_as_success_rates():
    batch = StepBatch(group=[0, 0], trajectory=["a", "b"], step=[0, 0], reward=[1, 10])
    with pytest.raises(ConfigError, match=r"a_grae: expected outcomes in \[0, 1\].*got 10 for trajectory 'b'"):
        compute_credit("grpo_steps", batch, modify=["a_grae"])
