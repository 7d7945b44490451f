"""rebn: both conventions of the std, its twin, and that the whole batch is one group."""

import naive
import numpy as np
import pytest
from estimator_cases import GAMMA, as_batch, assert_same_credit, cases, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch, compute_credit


@pytest.mark.parametrize(("std", "expected"), [("sample", "unbiased"), ("population", "population")])
@pytest.mark.parametrize("case", cases("rebn"))
def test_equals_the_formula_of_the_paper(case, std, expected):
    episodes = case["inputs"]["episode_rewards"]
    batch = StepBatch(
        group=[i for i, rewards in enumerate(episodes) for _ in rewards],
        trajectory=[i for i, rewards in enumerate(episodes) for _ in rewards],
        step=[t for rewards in episodes for t in range(len(rewards))],
        reward=[reward for rewards in episodes for reward in rewards],
    )
    credit = compute_credit("rebn", batch, gamma=case["params"]["gamma"], std=std, epsilon=case["params"]["eps"])
    np.testing.assert_allclose(credit.advantage, case["expected"][expected], rtol=0, atol=2e-5)
    np.testing.assert_allclose(credit.returns, np.concatenate(case["expected"]["returns"]), rtol=0, atol=2e-5)


@settings(max_examples=100, deadline=None)
@given(
    step_rows(),
    st.fixed_dictionaries(
        {**GAMMA, "std": st.sampled_from(["sample", "population"]), "epsilon": st.sampled_from([1e-9, 1e-3])}
    ),
)
def test_equals_its_naive_twin(rows, params):
    assert_same_credit(compute_credit("rebn", as_batch(rows), **params).advantage, naive.rebn(rows, **params))


def credit(reward, trajectory=None, **params):
    n = len(reward)
    columns = {name: params.pop(name) for name in ("penalty", "group") if name in params}
    rows = {"group": ["g"] * n, "trajectory": trajectory or range(n), "step": range(n), "reward": reward, **columns}
    return compute_credit("rebn", StepBatch(**rows), **params)


def test_hand_example():
    np.testing.assert_allclose(credit([1.0, 0.0]).advantage, [0.5**0.5, -(0.5**0.5)], atol=1e-8)
    np.testing.assert_allclose(credit([1.0, 0.0], std="population").advantage, [1, -1], atol=1e-8)
    got = credit([0.0, 1.0, 0.0], list("aab"))
    assert got.returns.tolist() == [0.9, 1.0, 0.0]
    mean, std = 1.9 / 3, np.std([0.9, 1.0, 0.0], ddof=1)
    np.testing.assert_allclose(got.advantage, (np.array([0.9, 1.0, 0.0]) - mean) / std, atol=1e-8)


def test_groups_do_not_matter():
    assert credit([3.0, 0.0, 1.0], group=list("ghg")).advantage.tolist() == credit([3.0, 0.0, 1.0]).advantage.tolist()


def test_penalty_stays_on_its_own_step():
    got = credit([0.0, 1.0], list("aa"), penalty=[0.0, 0.5])
    assert got.returns.tolist() == [0.9, 0.5]
