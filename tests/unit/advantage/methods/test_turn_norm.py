"""turn_norm: the check values of both rules, its twin, and that over the batch it is rebn."""

import naive
import numpy as np
import pytest
from estimator_cases import GAMMA, as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit

PARAMS = {
    **GAMMA,
    "rule": st.sampled_from(["gtpo", "mt_grpo"]),
    "over": st.sampled_from(["group", "batch"]),
    "turn_w": st.sampled_from([0.0, 0.5, 1.0]),
}


@settings(max_examples=100, deadline=None)
@given(step_rows("turn_score"), st.fixed_dictionaries(PARAMS))
def test_equals_its_naive_twin(rows, params):
    # one score per trajectory: a group's values are then the same, whichever row is counted
    outcome = {row["trajectory"]: row.get("score") for row in rows}
    rows = [row if outcome[row["trajectory"]] is None else {**row, "score": outcome[row["trajectory"]]} for row in rows]
    assert_same_credit(compute_credit("turn_norm", as_batch(rows), **params).advantage, naive.turn_norm(rows, **params))


def batch(reward, trajectory, score=None, turn_score=None):
    n = len(reward)
    return StepBatch(
        group=["g"] * n,
        trajectory=trajectory,
        step=range(n),
        reward=reward,
        score=score,
        extra={"turn_score": turn_score},
    )


@pytest.mark.parametrize("over", ["group", "batch"])
def test_check_values_of_gtpo(over):
    got = compute_credit("turn_norm", batch([0, -0.1, 1, 0, 0.4], list("aaabb")), over=over)
    np.testing.assert_allclose(got.returns, [0.72, 0.8, 1, 0.36, 0.4], atol=1e-12)
    np.testing.assert_allclose(got.advantage, [0.235141, 0.529067, 1.263882, -1.087526, -0.940563], atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(step_rows())
def test_over_the_batch_it_is_rebn(rows):
    got = compute_credit("turn_norm", as_batch(rows), over="batch").advantage
    assert got.tolist() == compute_credit("rebn", as_batch(rows), epsilon=1e-6).advantage.tolist()


def test_check_values_of_mt_grpo():
    """T 0.5, 0.2, 0, 0.1 and O 1, 0, 0, 1; then the same episodes in one turn each."""
    turn_score, score = [0.5, 0, 0.2, 0, 0, 0, 0.1, 0], [1, 1, 0, 0, 0, 0, 1, 1]
    got = compute_credit("turn_norm", batch([0] * 8, list("aabbccdd"), score, turn_score), rule="mt_grpo").advantage
    np.testing.assert_allclose(got[::2], [2.253963, -0.865875, -1.791267, 0.403180], atol=1e-6)
    np.testing.assert_allclose(got[1::2], [0.865875, -0.865875, -0.865875, 0.865875], atol=1e-6)
    alone = batch([1, 0, 0, 1], list("abcd"), turn_score=[0.5, 0.2, 0, 0.1])
    got = compute_credit("turn_norm", alone, rule="mt_grpo").advantage
    np.testing.assert_allclose(got, [1.116425, -0.697766, -0.976872, 0.558213], atol=1e-6)


def test_what_mt_grpo_lacks_is_named():
    with pytest.raises(ConfigError, match=r"'turn_norm' needs the column 'extra\.turn_score'.*record field"):
        compute_credit("turn_norm", batch([1, 0], list("ab")), rule="mt_grpo")
