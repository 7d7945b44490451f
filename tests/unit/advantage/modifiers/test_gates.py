"""length_gate and tool_gate: twins, by hand, and where they stay silent."""

import naive
import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit


def free(rows):
    return [{**row, "penalty": 0.0} for row in rows]


def four(success, **extra):
    """Four episodes of one step, of 2, 4, 6 and 8 tokens."""
    return StepBatch(
        group=["g"] * 4,
        trajectory=range(4),
        step=[0] * 4,
        reward=success,
        success=success,
        tokens=[2, 4, 6, 8],
        extra=extra,
    )


@settings(max_examples=50)
@given(step_rows("tokens", "success").map(free))
def test_length_gate(rows):
    base = compute_credit("grpo_steps", as_batch(rows)).advantage
    got = compute_credit("grpo_steps", as_batch(rows), modify=[{"name": "length_gate", "weight": 0.5}]).advantage
    assert_same_credit(got, naive.length_gate(rows, base, weight=0.5))


@settings(max_examples=50)
@given(step_rows("tokens", "success", "tool_calls").map(free), st.sampled_from(["rated", "all"]))
def test_tool_gate(rows, average):
    base = compute_credit("grpo_steps", as_batch(rows)).advantage
    entry = {"name": "tool_gate", "average": average}
    got = compute_credit("grpo_steps", as_batch(rows), modify=[entry]).advantage
    assert_same_credit(got, naive.tool_gate(rows, base, average=average))


def test_length_counts_only_where_all_are_solved():
    """Lengths 2, 4, 6, 8: mean 5, sample std 2.5820."""
    solved = compute_credit("grpo_steps", four([1, 1, 1, 1]), modify=["length_gate"])
    np.testing.assert_allclose(solved.advantage, [0.11619, 0.03873, -0.03873, -0.11619], atol=1e-5)
    assert solved.metrics["credit/length_gate/share_of_groups"] == 1.0
    for success in ([1, 1, 1, 0], [0, 0, 0, 0]):
        plain = compute_credit("grpo_steps", four(success))
        gated = compute_credit("grpo_steps", four(success), modify=["length_gate"])
        assert gated.advantage.tolist() == plain.advantage.tolist()
        assert gated.metrics["credit/length_gate/share_of_groups"] == 0.0


def test_calls_count_only_among_the_solved():
    """hdpo's check values for 0, 1 and 3 calls and an unsolved episode; 12 of 20 tokens are rated."""
    batch = four([1, 1, 1, 0], tool_calls=[0, 1, 3, 0])
    plain = compute_credit("grpo_steps", batch).advantage
    tool = np.array([1.0911, -0.2182, -0.8729, 0])
    for average, factor in (("all", 1.0), ("rated", 20 / 12)):
        entry = {"name": "tool_gate", "weight": 2.0, "average": average}
        credit = compute_credit("grpo_steps", batch, modify=[entry])
        np.testing.assert_allclose(credit.advantage - plain, 2 * factor * tool, atol=1e-3)
        assert credit.metrics["credit/tool_gate/factor"] == factor
        assert credit.metrics["credit/tool_gate/share_rated"] == 0.75


def test_both_gates_after_each_other():
    batch = four([1, 1, 1, 1], tool_calls=[1, 1, 1, 1])
    together = compute_credit("grpo_steps", batch, modify=["tool_gate", "length_gate"])
    assert together.metrics["credit/tool_gate/factor"] == 1.0
    np.testing.assert_allclose(together.advantage, [0.11619, 0.03873, -0.03873, -0.11619], atol=1e-5)


@pytest.mark.parametrize("name", ["length_gate", "tool_gate"])
def test_values(name):
    with pytest.raises(ConfigError, match=rf"\({name}\)\.weight: expected a finite number >= 0, got -1"):
        compute_credit("grpo_steps", four([1, 1, 1, 1], tool_calls=[0] * 4), modify=[{"name": name, "weight": -1.0}])
    with pytest.raises(ConfigError, match=rf"modifier '{name}' needs the column 'success'"):
        compute_credit("grpo_steps", StepBatch(group=[0], trajectory=[0], step=[0], reward=[1]), modify=[name])
