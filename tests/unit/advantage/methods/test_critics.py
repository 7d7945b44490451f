"""Methods with a critic or a prover: numbers of papers, their twins, and their edge cases."""

import naive
import numpy as np
import pytest
from estimator_cases import GAMMA, as_batch, assert_rows, assert_same_credit, cases, columns, step_rows, table
from hypothesis import given, settings
from hypothesis import strategies as st
from naive.critics import turn_gae_returns, vc_gae_returns

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit


# --- turn_gae: the reference, the hand example, its twin, how trajectories end, and whitening -------------------------
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
    credit_turn_gae = compute_credit("turn_gae", batch, gamma=params["gamma"], lam=params["lam"])
    assert_rows(credit_turn_gae.advantage, case["expected"]["advantages"], case, 2e-5)
    assert_rows(credit_turn_gae.returns, case["expected"]["returns"], case, 2e-5)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(step_rows("value", ends=True), step_rows("value", "tokens", ends=True)),
    st.fixed_dictionaries(
        {**GAMMA, "lam": st.sampled_from([0.0, 0.9, 1.0]), "truncated": st.sampled_from(["zero", "value"])}
    ),
    st.sampled_from(["turns", "none"]),
)
def test_turn_gae_equals_its_naive_twin(rows, params, whiten):
    credit_turn_gae = compute_credit("turn_gae", as_batch(rows), whiten=whiten, **params)
    assert_same_credit(credit_turn_gae.advantage, naive.turn_gae(rows, whiten=whiten, **params))
    assert_same_credit(credit_turn_gae.returns, turn_gae_returns(rows, **params))


HAND = columns([0.0, 0.0, 1.0], "ttt", value=[0.2, 0.5, 0.8], terminated=[False, False, True])
RAW = [0.713948, 0.470200, 0.2]


def credit_turn_gae(rows, **params):
    return compute_credit("turn_gae", StepBatch(**rows), **params)


def test_hand_example():
    got = credit_turn_gae(HAND, whiten="none")
    np.testing.assert_allclose(got.advantage, RAW, atol=1e-6)
    np.testing.assert_allclose(got.returns, [0.913948, 0.970200, 1.0], atol=1e-6)
    got = credit_turn_gae(HAND)
    np.testing.assert_allclose(got.advantage, [0.982410, 0.034297, -1.016707], atol=1e-6)
    np.testing.assert_allclose(got.returns, [0.913948, 0.970200, 1.0], atol=1e-6)


@pytest.mark.parametrize(
    ("terminated", "truncated", "bootstrap"),
    [(False, True, 0.8), (True, True, 0.0), (True, False, 0.0), (False, False, 0.0)],
)
def test_the_value_after_a_limit(terminated, truncated, bootstrap):
    rows = {**HAND, "terminated": [False, False, terminated], "truncated": [False, False, truncated]}
    for option, after in (("zero", 0.0), ("value", bootstrap)):
        got = credit_turn_gae(rows, whiten="none", truncated=option)
        last = 1.0 + 0.99 * after - 0.8
        assert got.advantage[2] == pytest.approx(last)
        assert got.advantage[1] == pytest.approx(0.99 * 0.8 - 0.5 + 0.99 * 0.9 * last)
        assert got.returns[2] == pytest.approx(last + 0.8)


@pytest.mark.parametrize("value", [0.0, 0.1, 8.57375, 1e6 + 0.1])
def test_a_constant_batch_gets_exactly_nothing(value):
    rows = {"group": range(7), "trajectory": range(7), "step": [0] * 7, "reward": [value] * 7, "value": [0.3] * 7}
    assert credit_turn_gae(rows).advantage.tolist() == [0] * 7


def test_turn_gae_without_a_critic():
    rows = {name: column for name, column in HAND.items() if name != "value"}
    with pytest.raises(ConfigError, match=r"'turn_gae' needs the column 'value'.*critic\.enable"):
        credit_turn_gae(rows)
    for missing in (float("nan"), None):
        with pytest.raises(ValueError, match="value"):
            credit_turn_gae({**HAND, "value": [0.2, missing, 0.8]})


# --- vc_gae: the check values, its twin, and its relation to turn_gae -------------------------------------------------
LAM = st.sampled_from([0.0, 0.9, 0.95, 1.0])


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(step_rows("value", ends=True), step_rows("value", "tokens", ends=True)),
    st.fixed_dictionaries(
        {
            **GAMMA,
            "lam_actor": LAM,
            "length_alpha": st.sampled_from([None, None, 0.05, 0.5, 2.0]),
            "lam_critic": LAM,
            "whiten": st.sampled_from(["turns", "none"]),
        }
    ),
)
def test_vc_gae_equals_its_naive_twin(rows, params):
    credit = compute_credit("vc_gae", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.vc_gae(rows, **params))
    assert_same_credit(credit.returns, vc_gae_returns(rows, params["gamma"], params["lam_critic"]))


CHECK = columns([0.0, 0.0, 1.0], "ttt", value=[0.5, 0.5, 0.5])


def test_vc_gae_check_values():
    """The end is worth 0, whatever stopped the episode."""
    for how in ({}, {"terminated": [False, False, True]}, {"truncated": [False, False, True]}):
        credit = compute_credit("vc_gae", StepBatch(**CHECK, **how), whiten="none")
        np.testing.assert_allclose(credit.advantage, [0.45125, 0.475, 0.5], atol=1e-12)
        np.testing.assert_allclose(credit.returns, [1, 1, 1], atol=1e-12)


def test_the_lambda_of_an_episode_follows_its_length():
    """VAPO's rule over turns: alpha 0.5 and 3 turns give lambda 1/3, 1 turn gives 0; the targets keep lambda 1."""
    values = [0.2, 0.4, 0.6]
    rows = columns([0.0, 0.0, 1.0, 1.0], "tttu", value=[*values, 0.25])
    credit = compute_credit("vc_gae", StepBatch(**rows), length_alpha=0.5, whiten="none")
    np.testing.assert_allclose(credit.advantage, [0.311111, 0.333333, 0.4, 0.75], atol=1e-6)
    np.testing.assert_allclose(credit.returns, [1, 1, 1, 1], atol=1e-12)


def test_targets_that_differ_by_rounding_have_no_variance_to_explain():
    """Nobody won: every target is 0, give or take 1e-17."""
    rows = {**CHECK, "reward": [0.0, 0.0, 0.0], "value": [0.1, 0.7, 0.3]}
    credit = compute_credit("vc_gae", StepBatch(**rows))
    assert credit.returns is not None
    assert 0 < np.abs(credit.returns).max() < 1e-15, "or this shows nothing"
    assert credit.metrics.get("credit/explained_variance", 0.0) == 0.0


def test_vc_gae_without_a_critic():
    with pytest.raises(ValueError, match="value"):
        compute_credit("vc_gae", StepBatch(**{**CHECK, "value": [0.5, float("nan"), 0.5]}))


# --- progress: the check values of PAV, VinePPO as its case without a prover, and its twin ----------------------------
PARAMS = {
    "alpha": st.sampled_from([0.0, 0.5, 3.0]),
    "prover": st.sampled_from(["given", "best_of_k"]),
    "k": st.sampled_from([1, 4]),
    "whiten": st.sampled_from(["none", "turns"]),
}
ROWS = st.one_of(step_rows("turn_value", "prover_value"), step_rows("turn_value"))


@settings(max_examples=100, deadline=None)
@given(ROWS, st.fixed_dictionaries(PARAMS))
def test_progress_equals_its_naive_twin(rows, params):
    got = compute_credit("progress", as_batch(rows), **params).advantage
    assert_same_credit(got, naive.progress(rows, **params))


def measured(rows, wanted):
    """``wanted`` says of each row in turn, from the first one again, whether its state was measured."""
    return [{**row, "value_rollouts": float(wanted[i % len(wanted)])} for i, row in enumerate(rows)]


@settings(max_examples=100, deadline=None)
@given(ROWS, st.fixed_dictionaries(PARAMS), st.lists(st.sampled_from([0, 0, 1, 9]), min_size=1, max_size=7))
def test_equals_its_naive_twin_over_segments(rows, params, wanted):
    rows = measured(rows, wanted)
    got = compute_credit("progress", as_batch(rows), segments=True, **params).advantage
    assert_same_credit(got, naive.progress(rows, segments=True, **params))


def test_every_step_of_a_segment_gets_what_the_segment_adds():
    """SPO's chain: before turns 1 and 3 of four; 0 before the first cut, whose value is filled in."""
    value = [0.4, 0.4, 0.4, 0.7]
    batch = table([0, 0, 0, 1], [0] * 4, turn_value=value, value_rollouts=[0, 9, 0, 9])
    got = compute_credit("progress", batch, alpha=0.0, segments=True).advantage
    np.testing.assert_allclose(got, [0.0, 0.3, 0.3, 0.3], atol=1e-12)
    with pytest.raises(ConfigError, match=r"extra\.value_rollouts"):
        credit_progress([1], [0.5], segments=True)


def credit_progress(reward, value, **params):
    n = len(reward)
    extra = {"turn_value": value, "prover_value": params.pop("prover_value", None)}
    columns = {"trajectory": [0] * n, "step": range(n), "reward": reward}
    return compute_credit("progress", StepBatch(group=["g"] * n, extra=extra, **columns), **params).advantage


def test_progress_check_values():
    """The policy's value rises from 0.2 to 0.5: A_mu 0.3471; the effective reward Q_pi + 5 A_mu is 2.2355."""
    alone, both = (credit_progress([0, 1], [0.2, 0.5], alpha=alpha, prover="best_of_k")[0] for alpha in (0.0, 5.0))
    assert alone == pytest.approx(0.5 - 0.2)
    assert (both - alone) / 5 == pytest.approx(0.3471, abs=1e-4)
    assert both + 0.2 == pytest.approx(2.2355, abs=1e-4)


def test_without_a_prover_it_is_vineppo():
    np.testing.assert_allclose(credit_progress([0, 0.25, 1], [0.2, 0.5, 0.4], alpha=0.0), [0.3, 0.15, 0.6], atol=1e-12)


def test_best_of_k_takes_probabilities():
    with pytest.raises(ConfigError, match=r"progress: extra\.turn_value: expected a finite number from 0 to 1"):
        credit_progress([1], [1.5], prover="best_of_k")
    assert np.isfinite(credit_progress([1], [1.5])).all()


def test_where_states_are_left_out_every_step_of_a_segment_gets_its_credit():
    """Two turns, of which the first decides: measured at every turn, or before the first alone."""

    def credit(values, rollouts, **params):
        batch = table([0.0, 1.0], "aa", turn_value=values, value_rollouts=rollouts)
        return compute_credit("progress", batch, alpha=0, **params).advantage.tolist()

    assert credit([0.5, 1.0], [9, 9]) == [0.5, 0.0]
    assert credit([0.5, 0.5], [9, 0]) == [0.5, 0.5]
    assert credit([0.5, 0.5], [9, 0], segments=False) == [0.0, 0.5]
    # An environment's own estimates say nothing of rollouts: each step stands for itself.
    assert credit([0.5, 0.5], None) == [0.0, 0.5]
