"""trace: the check values, its twin, and where it changes nothing."""

import json
from pathlib import Path

import naive
import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit

VALUES = json.loads((Path(__file__).parents[3] / "data" / "oracle" / "teacher_check_values.json").read_text())["trace"]
LOG_PROBS = [-3.0, -2.5, -2.0, -1.5, -0.4]
ROWS = step_rows("gold_probability").map(
    lambda rows: [{**row, "gold_probability": max(row["gold_probability"], 1e-6)} for row in rows]
)


def episode(outcome, probability):
    """One episode, which grpo_steps gives its outcome with singleton=score."""
    return StepBatch(
        group=[0] * len(probability),
        trajectory=[0] * len(probability),
        step=range(len(probability)),
        reward=[*[0] * (len(probability) - 1), outcome],
        extra={"gold_probability": probability},
    )


def credit(outcome, probability, **params):
    modify = [{"name": "trace", **params}]
    return compute_credit("grpo_steps", episode(outcome, probability), modify=modify, singleton="score")


@pytest.mark.parametrize("outcome", ["1.0", "-1.0"])
def test_check_values(outcome):
    case, got = VALUES[outcome], credit(float(outcome), np.exp(LOG_PROBS))
    np.testing.assert_allclose(got.advantage, [*case["A"], case["answer_turn"]], atol=1e-6)
    np.testing.assert_allclose(got.levels["trace/gain"], [*case["delta"], 0], atol=1e-6)
    np.testing.assert_allclose(got.levels["trace/term"], [*case["turn"], 0], atol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    ROWS,
    st.fixed_dictionaries(
        {
            "horizon": st.sampled_from([1, 2, 3, 50]),
            "gamma": st.sampled_from([0.0, 0.8, 1.0]),
            "outcome": st.sampled_from([0.0, 2.0]),
            "offset": st.sampled_from([0.1, 1.0]),
        }
    ),
)
def test_equals_its_naive_twin(rows, params):
    free = [{**row, "penalty": 0.0} for row in rows]
    base = compute_credit("grpo_steps", as_batch(free)).advantage
    got = compute_credit("grpo_steps", as_batch(free), modify=[{"name": "trace", **params}]).advantage
    assert_same_credit(got, naive.trace(free, base, **params))


def test_an_answer_alone_keeps_the_outcome_and_a_probability_of_0_is_finite():
    assert credit(1.0, [0.0]).advantage.tolist() == [1.0]
    assert np.isfinite(credit(1.0, [0.0, 1.0, 0.0]).advantage).all()
    assert credit(1.0, [0.2, 0.9, 0.1], weight=0.0).advantage.tolist() == [1.0] * 3


def test_a_probability_out_of_range_is_an_error():
    with pytest.raises(ConfigError, match=r"trace: extra\.gold_probability"):
        credit(1.0, [0.5, 1.5])
