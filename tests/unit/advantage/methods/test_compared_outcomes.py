"""Methods that compare outcomes: numbers of papers and references, their twins, and their edge cases."""

import naive
import numpy as np
import pytest
import torch
from estimator_cases import (
    EPISODE,
    EPSILON,
    NORMS,
    TOLERANCE,
    as_batch,
    assert_rows,
    assert_same_credit,
    cases,
    oracle_batch,
    step_rows,
    table,
    with_rates,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from naive.outcomes import tool_advantages

from verl_turnkey.advantage import ConfigError, compute_credit
from verl_turnkey.losses.clipping import accumulated_ratio


# --- grpo_steps: the reference, its twin, groups of one and rounding --------------------------------------------------
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scope", ["steps", "trajectories"])
@pytest.mark.parametrize("case", cases("baselines_grpo_rloo"))
def test_grpo_steps_equals_the_reference(case, scope, norm):
    statistics = {"steps": "cross_step_stats", "trajectories": "per_trajectory_stats"}[scope]
    expected = case["expected"][statistics][{"mean_std": "grpo_std", "mean": "grpo_nostd"}[norm]]
    credit = compute_credit("grpo_steps", oracle_batch(case), scope=scope, norm=norm, singleton="score")
    assert_rows(credit.advantage, expected, case, TOLERANCE[norm])


@settings(max_examples=100, deadline=None)
@given(step_rows(), st.fixed_dictionaries(EPISODE))
def test_grpo_steps_equals_its_naive_twin(rows, params):
    credit = compute_credit("grpo_steps", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.grpo_steps(rows, **params))


def test_rounding_is_no_spread():
    """Nobody gained anything, but a sum says 5e-17; a penalised row would be -1e5 standard deviations away."""
    batch = table([0.1, 0.2, -0.3, 0.0], ["t0", "t0", "t0", "t1"], penalty=[0.0, 0.1, 0.0, 0.0])
    assert 0 < batch.score[0] < 1e-16, "or this shows nothing"
    assert not compute_credit("grpo_steps", batch, scope="trajectories").advantage.any()
    assert compute_credit("grpo_steps", batch).advantage.tolist() == [0, -0.1, 0, 0]


def test_grpo_steps_hand_example():
    batch = table([0.0, 10.0, 0.0], "aab")
    np.testing.assert_allclose(compute_credit("grpo_steps", batch).advantage, np.array([1, 1, -1]) / 2**0.5, atol=1e-6)
    np.testing.assert_allclose(
        compute_credit("grpo_steps", batch, scope="steps").advantage, np.array([1, 1, -2]) / 3**0.5, atol=1e-6
    )


# --- rloo_steps: the reference, its twin, the plain definition, and what it shares with salt --------------------------
PARAMS = st.fixed_dictionaries({key: EPISODE[key] for key in ("scope", "singleton")})


@pytest.mark.parametrize("scope", ["steps", "trajectories"])
@pytest.mark.parametrize("case", cases("baselines_grpo_rloo"))
def test_rloo_steps_equals_the_reference(case, scope):
    statistics = {"steps": "cross_step_stats", "trajectories": "per_trajectory_stats"}[scope]
    credit = compute_credit("rloo_steps", oracle_batch(case), scope=scope, singleton="score")
    assert_rows(credit.advantage, case["expected"][statistics]["rloo"], case, 2e-5)


@settings(max_examples=100, deadline=None)
@given(step_rows(), PARAMS)
def test_rloo_steps_equals_its_naive_twin(rows, params):
    credit = compute_credit("rloo_steps", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.rloo_steps(rows, **params))


def test_each_outcome_against_the_mean_of_the_others():
    """The check values of LOOP: 1, .5, 0, 0."""
    batch = table([1, 0.5, 0, 0])
    np.testing.assert_allclose(compute_credit("rloo_steps", batch).advantage, [5 / 6, 1 / 6, -0.5, -0.5], atol=1e-12)


# --- maxrl: the check values, its twin, and means that are no scale ---------------------------------------------------
def credit_maxrl(outcomes, **params):
    batch = table(outcomes)
    return compute_credit("maxrl", batch, **params).advantage


#: Sums of several rewards are 0 but for rounding.
NOISE = 0.1 + 0.2 - 0.3


@settings(max_examples=100, deadline=None)
@given(
    step_rows(),
    st.fixed_dictionaries({"epsilon": st.sampled_from([0.0, 1e-6]), "singleton": st.sampled_from(["zero", "score"])}),
)
def test_maxrl_equals_its_naive_twin(rows, params):
    assert_same_credit(compute_credit("maxrl", as_batch(rows), **params).advantage, naive.maxrl(rows, **params))


def test_maxrl_check_values():
    np.testing.assert_allclose(credit_maxrl([1, 0, 0, 0]), [3, -1, -1, -1], atol=1e-12)
    np.testing.assert_allclose(credit_maxrl([1, 0, 0, 0], epsilon=1e-6), [2.999988, *[-0.999996] * 3], atol=1e-6)
    np.testing.assert_allclose(credit_maxrl([1, 0.5, 0]), [1, 0, -1], atol=1e-12)


@pytest.mark.parametrize("outcomes", [[0, 0], [1, 1, 1], [0.1 + 0.2, 0.3], [NOISE, 0, 0], [-NOISE, 0]])
def test_without_a_success_or_a_difference_there_is_nothing_to_learn(outcomes):
    assert credit_maxrl(outcomes).tolist() == [0] * len(outcomes)


@pytest.mark.parametrize("outcomes", [[0.1, 0.2, -0.3], [1, -1], [0, -1], [-1, -3], [1, 1, 1, -0.5]])
def test_a_group_with_a_negative_outcome_has_no_scale(outcomes):
    """Its mean may be anything: rounding noise, negative, or small because failures were punished hard."""
    assert credit_maxrl(outcomes).tolist() == [0] * len(outcomes)


def test_a_zero_that_is_negative_by_rounding_is_a_failure():
    np.testing.assert_allclose(credit_maxrl([1, -NOISE]), [1, -1], atol=1e-12)


def test_the_metrics_say_which_groups_teach_nothing():
    batch = table([1, 0, 0, NOISE, 2, -1, -1, 0], group="aabbccdd")
    metrics = compute_credit("maxrl", batch).metrics
    assert metrics["credit/share_groups_without_success"] == 0.25
    assert metrics["credit/share_groups_with_negative_outcomes"] == 0.5


# --- mc_grpo: the check value without a floor, its twin, and what the floor is for ------------------------------------
def one_group_mc_grpo(outcomes, **params):
    batch = table(outcomes)
    return compute_credit("mc_grpo", batch, **params)


PARAMS_MC_GRPO = {"floor": st.sampled_from([0.0, 0.6745, 2.0]), "epsilon": st.sampled_from([1e-3, 0.1])}


@settings(max_examples=80)
@given(step_rows(), st.fixed_dictionaries(PARAMS_MC_GRPO))
def test_mc_grpo_equals_its_naive_twin(rows, params):
    assert_same_credit(compute_credit("mc_grpo", as_batch(rows), **params).advantage, naive.mc_grpo(rows, **params))


def test_the_plain_formula_is_dangerous_with_outcomes_of_0_and_1():
    credit = one_group_mc_grpo([0, 0, 0, 0, 1], floor=0.0)
    np.testing.assert_allclose(credit.advantage, [0, 0, 0, 0, 5000], rtol=1e-12)
    assert credit.metrics["credit/share_groups_without_mad"] == 1.0
    np.testing.assert_allclose(one_group_mc_grpo([0, 0, 0, 0, 1]).advantage, [0, 0, 0, 0, 16.521], atol=1e-3)


def test_where_outcomes_differ_the_floor_does_nothing():
    """b = 3, MAD = median of 3, 2, 0, 4, 7 = 3; four of five differ from b. The sample std is 3.6332."""
    outcomes = [0, 1, 3, 7, 10]
    by_hand = (np.array(outcomes) - 3) / 3.001 * 5 / 4
    np.testing.assert_allclose(one_group_mc_grpo(outcomes, floor=0.0).advantage, by_hand, rtol=1e-12)
    np.testing.assert_allclose(one_group_mc_grpo(outcomes).advantage, by_hand, rtol=1e-12)
    assert one_group_mc_grpo(outcomes).metrics["credit/share_groups_without_mad"] == 0.0


@pytest.mark.parametrize("outcomes", [[0.1 + 0.2, 0.3, 0.3], [1], [5, 5]])
def test_equal_outcomes_are_nothing(outcomes):
    assert one_group_mc_grpo(outcomes, floor=0.0).advantage.tolist() == [0] * len(outcomes)


# --- ngrpo: the check values, its twin, and what no outcome may be ----------------------------------------------------
def one_group_ngrpo(outcomes, **params):
    return compute_credit("ngrpo", table(outcomes), **params)


@settings(max_examples=60)
@given(step_rows().map(with_rates), st.fixed_dictionaries({"r_max": st.sampled_from([1.0, 7.0]), **EPSILON}))
def test_ngrpo_equals_its_naive_twin(rows, params):
    assert_same_credit(compute_credit("ngrpo", as_batch(rows), **params).advantage, naive.ngrpo(rows, **params))


def test_ngrpo_check_values():
    np.testing.assert_allclose(one_group_ngrpo([0] * 8).advantage, [-1 / 3] * 8, atol=1e-5)
    np.testing.assert_allclose(one_group_ngrpo([1, 0, 0, 0]).advantage, [1.0954, *[-0.7303] * 3], atol=1e-4)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_group_that_failed_learns_and_one_that_won_does_not(n):
    np.testing.assert_allclose(one_group_ngrpo([0] * n).advantage, [-1 / np.sqrt(n + 1)] * n, atol=1e-5)
    assert one_group_ngrpo([1] * n).advantage.tolist() == [0] * n
    assert one_group_ngrpo([0] * n).metrics["credit/share_groups_without_r_max"] == 1.0
    assert one_group_ngrpo([1] * n).metrics["credit/share_groups_without_r_max"] == 0.0


def test_nothing_is_better_than_r_max():
    assert one_group_ngrpo([0.1 + 0.2], r_max=0.3).advantage.tolist() == [0]
    with pytest.raises(
        ConfigError, match=r"ngrpo: expected outcomes of at most r_max=1, got 10 for trajectory 1.*set r_max"
    ):
        one_group_ngrpo([0, 10])
    with pytest.raises(ConfigError, match=r"ngrpo\.r_max: expected a finite number, got inf"):
        one_group_ngrpo([0], r_max=float("inf"))


# --- seeupo: the released code turn after turn (with the ratio of the losses), its twin, groups of one ----------------
def credit_seeupo(score, group, **params):
    batch = table(score, group=group)
    return compute_credit("seeupo", batch, **params).advantage


@pytest.mark.parametrize("case", cases("seeupo"))
def test_every_turn_equals_the_reference(case):
    """A turn at a time, the last first: the reference normalizes over the rows of the turn, one per trajectory."""
    params = case["params"]
    ratio = torch.ones(len(case["inputs"]["uid"]))
    for turn in case["turns_in_update_order"]:
        mask = np.array(turn["response_mask"])
        score = np.array(turn["token_level_rewards"]).sum(1)
        advantage = credit_seeupo(score, case["inputs"]["uid"], clamp=params["clamp_adv"]) * ratio.numpy()
        expected = np.array(turn["expected"]["advantages"])
        np.testing.assert_allclose(advantage[:, None] * mask, expected, atol=2e-5, rtol=0)
        before, after = (torch.tensor(turn[f"log_prob_{when}"]) for when in ("before", "after"))
        clip = {"clip_low": params["adv_clip_ratio_low"], "clip_high": params["adv_clip_ratio_high"]}
        ratio = accumulated_ratio(ratio, before, after, torch.tensor(mask), **clip)
        torch.testing.assert_close(ratio, torch.tensor(turn["expected"]["ratios_after"]), atol=2e-6, rtol=0)


def test_some_reference_has_a_signal():
    turns = [turn for case in cases("seeupo") for turn in case.values[0]["turns_in_update_order"]]
    assert max(np.abs(turn["expected"]["advantages"]).max() for turn in turns) > 0.5


@settings(max_examples=100, deadline=None)
@given(
    step_rows(),
    st.fixed_dictionaries({"clamp": st.sampled_from([0.5, 3.0]), "singleton": st.sampled_from(["zero", "score"])}),
)
def test_seeupo_equals_its_naive_twin(rows, params):
    assert_same_credit(compute_credit("seeupo", as_batch(rows), **params).advantage, naive.seeupo(rows, **params))


def test_seeupo_hand_example():
    # centred: -1, 1, -2, 2; their sample std is sqrt(10 / 3)
    expected = np.array([-1.0, 1.0, -2.0, 2.0]) / (10 / 3) ** 0.5
    np.testing.assert_allclose(credit_seeupo([0.0, 2.0, 1.0, 5.0], list("aabb")), expected)
    np.testing.assert_allclose(credit_seeupo([0.0, 2.0, 1.0, 5.0], list("aabb"), clamp=0.6), expected.clip(-0.6, 0.6))


# --- hdpo: the check values of the two advantages, its twins, and who has no tool advantage ---------------------------
def credit_hdpo(success, calls):
    return compute_credit("hdpo", table([*map(float, success)], success=success, tool_calls=calls))


def test_hdpo_check_values():
    hdpo = credit_hdpo([True, True, True, False], [0, 1, 3, 0])
    np.testing.assert_allclose(hdpo.extra["tool_advantages"], [1.0911, -0.2182, -0.8729, 0.0], atol=1e-4)
    np.testing.assert_allclose(hdpo.advantage, [0.5, 0.5, 0.5, -1.5], atol=1e-4)


@settings(max_examples=100, deadline=None)
@given(step_rows("success"), st.randoms(use_true_random=True), st.fixed_dictionaries(EPSILON))
def test_hdpo_equals_its_naive_twin(rows, random, params):
    solved = {row["trajectory"]: row["success"] for row in rows}
    rows = [{**row, "success": solved[row["trajectory"]], "tool_calls": random.randint(0, 3)} for row in rows]
    hdpo = compute_credit("hdpo", as_batch(rows), **params)
    assert_same_credit(hdpo.advantage, naive.hdpo(rows, **params))
    assert_same_credit(hdpo.extra["tool_advantages"], tool_advantages(rows, **params))
