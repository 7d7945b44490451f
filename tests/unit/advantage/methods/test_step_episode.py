"""step_episode: the check value, its twin, the three normalisers, and the released code's baseline."""

import naive
import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch, compute_credit

ESTIMATORS = ["rloo", "grpo", "reinforce_pp"]
PARAMS = {
    "alpha": st.sampled_from([0.0, 0.5, 1.0]),
    "estimator": st.sampled_from(ESTIMATORS),
    "baseline": st.sampled_from(["all_steps", "one_per_trajectory"]),
}


@settings(max_examples=100, deadline=None)
@given(step_rows("turn_score"), st.fixed_dictionaries(PARAMS))
def test_equals_its_naive_twin(rows, params):
    # one score per trajectory, as the twin counts it once
    outcome = {row["trajectory"]: row.get("score") for row in rows}
    rows = [row if outcome[row["trajectory"]] is None else {**row, "score": outcome[row["trajectory"]]} for row in rows]
    got = compute_credit("step_episode", as_batch(rows), **params).advantage
    assert_same_credit(got, naive.step_episode(rows, **params))


def credit(reward, score, trajectory=None, **params):
    n = len(reward)
    batch = StepBatch(
        group=["g"] * n,
        trajectory=trajectory or range(n),
        step=range(n),
        reward=reward,
        extra={"turn_score": score},
    )
    return compute_credit("step_episode", batch, **params)


def test_check_value_of_the_episode_term():
    got = credit([1, 0, 0, 0], [0.5] * 4).advantage
    np.testing.assert_allclose(got, [1, -1 / 3, -1 / 3, -1 / 3], atol=1e-12)


@pytest.mark.parametrize(
    ("baseline", "expected"),
    # all: each score less the mean of the other two; one: 2 (q - mean of 1 and 0)
    [("all_steps", [0.0, 1.5, -1.5]), ("one_per_trajectory", [1.0, 3.0, -1.0])],
)
def test_step_scores_by_hand(baseline, expected):
    got = credit([0, 0, 0], [1, 2, 0], list("aab"), baseline=baseline).advantage
    np.testing.assert_allclose(got, expected, atol=1e-12)


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp"])
def test_the_scale_of_the_scores_does_not_matter(estimator):
    advantage = credit([0, 0, 0, 0], [1, 2, 0, 5], estimator=estimator).advantage
    other = credit([0, 0, 0, 0], [10, 20, 0, 50], estimator=estimator).advantage
    np.testing.assert_allclose(advantage, other, atol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_constant_group_beside_another_gets_nothing(estimator):
    batch = StepBatch(
        group=list("aabb"),
        trajectory=range(4),
        step=[0] * 4,
        reward=[1, 1, 1, 0],
        extra={"turn_score": [0.3, 0.3, 0.1, 0.2]},
    )
    got = compute_credit("step_episode", batch, estimator=estimator).advantage
    assert got[:2].tolist() == [0, 0]
    assert got[2:].all()
