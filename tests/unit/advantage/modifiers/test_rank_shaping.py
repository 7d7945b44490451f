"""rank_shaping: the check values, its twin over several batches, and the last token alone."""

import json
from pathlib import Path
from random import Random

import naive
import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from naive.rank_shaping import NAMES, phi

from verl_turnkey.advantage import ConfigError, StepBatch, Tokens, compute_credit

VALUES = json.loads((Path(__file__).parents[3] / "data" / "oracle" / "learned_check_values.json").read_text())
VALUES = VALUES["effective_rank"]
NUMBERS = (VALUES["ER"], VALUES["ERV"], VALUES["ERA"])
STATE = {f"modify/rank_shaping/{name}": mu for name, mu in zip(NAMES, VALUES["mu"], strict=True)}


def three(**params):
    """Three episodes of one step with the check values' columns; their advantages are 0.8, -0.8 and 0."""
    columns = {name: [value] * 3 for name, value in zip(NAMES, NUMBERS, strict=True)}
    batch = StepBatch(
        group=[0, 1, 2], trajectory=[0, 1, 2], step=[0] * 3, reward=[0.0] * 3, score=[0.8, -0.8, 0.0], extra=columns
    )
    modify = [{"name": "rank_shaping", **params}]
    tokens = Tokens([0, 0, 1, 2, 2, 2], [0.0] * 6)
    return compute_credit("grpo_steps", batch, modify=modify, state=STATE, tokens=tokens, singleton="score")


def test_check_values():
    credit = three()
    np.testing.assert_allclose(credit.levels["rank_shaping/phi"], [VALUES["Phi"]] * 3, atol=1e-7)
    np.testing.assert_allclose(credit.advantage, VALUES["A' of A0 = 0.8, -0.8, 0.0 (kappa 2)"], atol=1e-7)
    assert phi(NUMBERS, VALUES["mu"]) == pytest.approx(VALUES["Phi"], abs=1e-7)
    b_low, phi_low = VALUES["mu 2.0, 0.3, 0.1: b, Phi"]
    assert phi(NUMBERS, (2.0, 0.3, 0.1)) == pytest.approx(phi_low, abs=1e-7)
    assert 0 < b_low < 0.01


def test_the_running_means_follow_the_batch_after_use():
    state = three(rate=0.3).state
    expected = [0.7 * mu + 0.3 * x for mu, x in zip(VALUES["mu"], NUMBERS, strict=True)]
    assert [state[f"modify/rank_shaping/{name}"] for name in NAMES] == pytest.approx(expected)


@pytest.mark.parametrize("gap", [0.0, np.nan])
def test_a_turn_without_tokens_has_no_rank(gap):
    """8, 8 and an empty turn are 8 on average; an empty batch leaves the means as they were."""

    def run(tokens, state=None):
        rows, ranks = range(len(tokens)), [8.0 if n else gap for n in tokens]
        columns = {"group": rows, "trajectory": rows, "step": [0] * len(tokens), "reward": [1.0] * len(tokens)}
        batch = StepBatch(**columns, tokens=tokens, extra=dict.fromkeys(NAMES, ranks))
        return compute_credit("grpo_steps", batch, modify=["rank_shaping"], state=state, singleton="score")

    first = run([5, 5, 0])
    assert [*first.state.values()] == [8.0] * 3
    assert first.metrics["credit/rank_shaping/rank/mean"] == 8.0
    assert run([0, 0], first.state).state == first.state
    lower = dict.fromkeys(first.state, 4.0)
    assert (run([5, 0], lower).advantage > 1).tolist() == [True, False]


def test_the_last_token_alone_is_raised():
    """As released; the step's advantage is the mean of its tokens."""
    every, last = three(), three(tokens="last")
    added = every.advantage - [0.8, -0.8, 0.0]
    np.testing.assert_allclose(last.tokens, [0.8, 0.8 + added[0], -0.8 + added[1], 0, 0, 0], atol=1e-9)
    np.testing.assert_allclose(last.advantage, [0.8 + added[0] / 2, -0.8 + added[1], 0.0], atol=1e-9)
    assert last.state == every.state


@settings(max_examples=40)
@given(
    step_rows(),
    st.integers(0, 99),
    st.fixed_dictionaries({"gain": st.sampled_from([0.0, 2.0]), "weight": st.sampled_from([0.5, 3.0]),
        "kappa": st.sampled_from([1.0, 2.0]), "rate": st.sampled_from([0.3, 1.0])}),
)  # fmt: skip
def test_equals_its_naive_twin_from_batch_to_batch(rows, seed, params):
    random = Random(seed)
    rows = [{**row, "penalty": 0.0} for row in rows]
    state, twins_state = {}, {}
    for _ in range(3):
        rows = [{**row, **{name: random.choice([-0.5, 0.0, 0.2, 3.0]) for name in NAMES}} for row in rows]
        batch = as_batch(rows)
        base = compute_credit("grpo_steps", batch).advantage
        credit = compute_credit("grpo_steps", batch, modify=[{"name": "rank_shaping", **params}], state=state)
        twin, twins_state = naive.rank_shaping(rows, base, twins_state, **params)
        assert_same_credit(credit.advantage, twin)
        state = credit.state
        assert [state[f"modify/rank_shaping/{name}"] for name in NAMES] == pytest.approx([*twins_state.values()])


@pytest.mark.parametrize("params", [{"kappa": 0}, {"rate": 0}, {"stride": 0}, {"window": 40}, {"tokens": "first"}])
def test_parameters_out_of_bounds(params):
    with pytest.raises(ConfigError, match=next(iter(params))):
        three(**params)
