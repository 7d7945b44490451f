"""rloo_steps: the reference, its twin, the plain definition, and what it shares with salt."""

import naive
import numpy as np
import pytest
from estimator_cases import EPISODE, as_batch, assert_rows, assert_same_credit, cases, oracle_batch, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch, compute_credit

PARAMS = st.fixed_dictionaries({key: EPISODE[key] for key in ("scope", "singleton")})


@pytest.mark.parametrize("scope", ["steps", "trajectories"])
@pytest.mark.parametrize("case", cases("baselines_grpo_rloo"))
def test_equals_the_reference(case, scope):
    statistics = {"steps": "cross_step_stats", "trajectories": "per_trajectory_stats"}[scope]
    credit = compute_credit("rloo_steps", oracle_batch(case), scope=scope, singleton="score")
    assert_rows(credit.advantage, case["expected"][statistics]["rloo"], case, 2e-5)


@settings(max_examples=100, deadline=None)
@given(step_rows(), PARAMS)
def test_equals_its_naive_twin(rows, params):
    credit = compute_credit("rloo_steps", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.rloo_steps(rows, **params))


def test_each_outcome_against_the_mean_of_the_others():
    """The check values of LOOP: 1, .5, 0, 0."""
    batch = StepBatch(group=["g"] * 4, trajectory=range(4), step=[0] * 4, reward=[1, 0.5, 0, 0])
    np.testing.assert_allclose(compute_credit("rloo_steps", batch).advantage, [5 / 6, 1 / 6, -0.5, -0.5], atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(step_rows(), st.sampled_from([0.5, 2.0, 1024.0]))
def test_it_has_the_scale_of_the_rewards(rows, scale):
    free = [{**row, "penalty": 0.0} for row in rows]
    scaled = [{key: v * scale if key in ("reward", "score") else v for key, v in row.items()} for row in free]
    unscaled, other = (compute_credit("rloo_steps", as_batch(x)).advantage for x in (free, scaled))
    np.testing.assert_allclose(other, scale * unscaled, rtol=1e-9, atol=1e-9)


@settings(max_examples=50, deadline=None)
@given(step_rows())
def test_it_is_the_base_of_salt_where_no_step_is_shared(rows):
    alone = [{**row, "anchor": None, "action": None} for row in rows]
    salt = compute_credit("salt", as_batch(alone), base="rloo").advantage
    assert salt.tolist() == compute_credit("rloo_steps", as_batch(rows)).advantage.tolist()
