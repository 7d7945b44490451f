"""turn_gae: the reference, the hand example, its twin, how trajectories end, and whitening."""

import naive
import numpy as np
import pytest
from estimator_cases import GAMMA, as_batch, assert_rows, assert_same_credit, cases, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from naive.turn_gae import turn_gae_returns

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit


@pytest.mark.parametrize("case", cases("turn_gae"))
def test_equals_the_reference(case):
    inputs, params = case["inputs"], case["params"]
    mask, reward = np.array(inputs["response_mask"]), np.array(inputs["token_level_rewards"])
    batch = StepBatch(
        group=["g"] * len(mask),
        trajectory=inputs["traj_uid"],
        step=inputs["turn_idx"],
        reward=(reward * mask).sum(1),
        terminated=inputs["dones"],
        tokens=mask.sum(1),
        value=np.where(mask.any(1), np.array(inputs["values"])[:, 0], 0.0),
    )
    credit = compute_credit("turn_gae", batch, gamma=params["gamma"], lam=params["lam"])
    assert_rows(credit.advantage, case["expected"]["advantages"], case, 2e-5)
    assert_rows(credit.returns, case["expected"]["returns"], case, 2e-5)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(step_rows("value", ends=True), step_rows("value", "tokens", ends=True)),
    st.fixed_dictionaries(
        {**GAMMA, "lam": st.sampled_from([0.0, 0.9, 1.0]), "truncated": st.sampled_from(["zero", "value"])}
    ),
    st.sampled_from(["turns", "none"]),
)
def test_equals_its_naive_twin(rows, params, whiten):
    credit = compute_credit("turn_gae", as_batch(rows), whiten=whiten, **params)
    assert_same_credit(credit.advantage, naive.turn_gae(rows, whiten=whiten, **params))
    assert_same_credit(credit.returns, turn_gae_returns(rows, **params))


HAND = {
    "group": ["g"] * 3,
    "trajectory": ["t"] * 3,
    "step": [0, 1, 2],
    "reward": [0.0, 0.0, 1.0],
    "value": [0.2, 0.5, 0.8],
    "terminated": [False, False, True],
}
RAW = [0.713948, 0.470200, 0.2]


def credit(rows, **params):
    return compute_credit("turn_gae", StepBatch(**rows), **params)


def test_hand_example():
    got = credit(HAND, whiten="none")
    np.testing.assert_allclose(got.advantage, RAW, atol=1e-6)
    np.testing.assert_allclose(got.returns, [0.913948, 0.970200, 1.0], atol=1e-6)
    got = credit(HAND)
    np.testing.assert_allclose(got.advantage, [0.982410, 0.034297, -1.016707], atol=1e-6)
    np.testing.assert_allclose(got.returns, [0.913948, 0.970200, 1.0], atol=1e-6)


def test_turns_go_by_step_number_and_missing_ones_are_skipped():
    order = [2, 0, 1]
    rows = {name: [column[i] for i in order] for name, column in HAND.items()} | {"step": [9, 2, 3]}
    np.testing.assert_allclose(credit(rows, whiten="none").advantage, np.array(RAW)[order], atol=1e-6)


def test_an_end_in_the_middle_lets_nothing_through():
    rows = {**HAND, "terminated": [False, True, False]}
    got = credit(rows, whiten="none").advantage
    second = 0 - 0.5
    np.testing.assert_allclose(got, [0.99 * 0.5 - 0.2 + 0.99 * 0.9 * second, second, 0.2], atol=1e-12)


@pytest.mark.parametrize(
    ("terminated", "truncated", "bootstrap"),
    [(False, True, 0.8), (True, True, 0.0), (True, False, 0.0), (False, False, 0.0)],
)
def test_the_value_after_a_limit(terminated, truncated, bootstrap):
    rows = {**HAND, "terminated": [False, False, terminated], "truncated": [False, False, truncated]}
    for option, after in (("zero", 0.0), ("value", bootstrap)):
        got = credit(rows, whiten="none", truncated=option)
        last = 1.0 + 0.99 * after - 0.8
        assert got.advantage[2] == pytest.approx(last)
        assert got.advantage[1] == pytest.approx(0.99 * 0.8 - 0.5 + 0.99 * 0.9 * last)
        assert got.returns[2] == pytest.approx(last + 0.8)


def test_only_the_limit_at_the_last_step_counts():
    rows = {**HAND, "terminated": [False] * 3, "truncated": [False, True, False]}
    np.testing.assert_allclose(credit(rows, whiten="none", truncated="value").advantage, RAW, atol=1e-6)


def test_penalty_stays_on_its_own_turn():
    got = credit({**HAND, "penalty": [0.0, 0.1, 0.0]}, whiten="none")
    np.testing.assert_allclose(got.advantage, np.array(RAW) - [0, 0.1, 0], atol=1e-6)
    np.testing.assert_allclose(got.returns, [0.913948, 0.870200, 1.0], atol=1e-6)


def test_turns_without_tokens_do_not_take_part_in_the_whitening():
    rows = {name: column * 2 for name, column in HAND.items()} | {"trajectory": ["t"] * 3 + ["u"] * 3}
    rows["reward"] = [0.0, 0.0, 1.0, 0.0, 0.0, 50.0]
    counted = credit({**rows, "tokens": [5, 1, 9, 0, 0, 0]}).advantage
    np.testing.assert_allclose(counted[:3], credit(HAND).advantage, atol=1e-12)
    assert not np.allclose(credit(rows).advantage[:3], counted[:3], atol=0.1), "without tokens all turns count"


@pytest.mark.parametrize("tokens", [[0, 0, 0], [0, 4, 0]])
def test_whitening_needs_two_turns(tokens):
    assert credit({**HAND, "tokens": tokens}).advantage.tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [0.0, 0.1, 8.57375, 1e6 + 0.1])
def test_a_constant_batch_gets_exactly_nothing(value):
    rows = {"group": range(7), "trajectory": range(7), "step": [0] * 7, "reward": [value] * 7, "value": [0.3] * 7}
    assert credit(rows).advantage.tolist() == [0] * 7


def test_without_a_critic():
    rows = {name: column for name, column in HAND.items() if name != "value"}
    with pytest.raises(ConfigError, match=r"'turn_gae' needs the column 'value'.*critic\.enable"):
        credit(rows)
    for missing in (float("nan"), None):
        with pytest.raises(ValueError, match="value"):
            credit({**HAND, "value": [0.2, missing, 0.8]})
