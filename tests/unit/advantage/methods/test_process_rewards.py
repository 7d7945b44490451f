"""Methods with rewards of turns: numbers of papers, their twins, and their edge cases."""

import naive
import numpy as np
import pytest
from estimator_cases import GAMMA, as_batch, assert_same_credit, cases, step_rows, table
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit
from verl_turnkey.advantage.methods.step_potential import potential, saturation_factor

# --- dual_granularity: the check values of the step term, its twin, and what a step weighs ----------------------------
PARAMS = {"beta": st.sampled_from([0.0, 0.3, 1.0]), "weight": st.sampled_from(["tokens", "steps"])}
ROWS = st.one_of(step_rows("turn_score", "tokens"), step_rows("turn_score"))


@settings(max_examples=100, deadline=None)
@given(ROWS, st.fixed_dictionaries(PARAMS))
def test_dual_granularity_equals_its_naive_twin(rows, params):
    got = compute_credit("dual_granularity", as_batch(rows), **params).advantage
    assert_same_credit(got, naive.dual_granularity(rows, **params))


def credit_dual_granularity(score, tokens, **params):
    batch = table([0.0] * len(score), [0, 0, 1][: len(score)], tokens=tokens, turn_score=score)
    return compute_credit("dual_granularity", batch, **params)


def test_dual_granularity_check_values():
    """Scores per token 1, 1, 1, -2 and 1, 1."""
    got = credit_dual_granularity([1, -2, 1], [3, 1, 2], beta=1.0).advantage
    np.testing.assert_allclose(got, [0.4472, -2.2361, 0.4472], atol=1e-4)


def test_steps_may_count_once():
    got = credit_dual_granularity([1, -2, 1], [3, 1, 2], beta=1.0, weight="steps").advantage
    np.testing.assert_allclose(got, [0.5**0.5, -(2**0.5), 0.5**0.5], atol=1e-5)
    unknown = credit_dual_granularity([1, -2, 1], None, beta=1.0).advantage
    assert unknown.tolist() == got.tolist()


# --- dual_level: the check values, its twin, turns by ordinal, and the released code's average and lone turns ---------
WEIGHTS = st.sampled_from([0.0, 0.5, 1.0])
LEVELS = {
    **GAMMA,
    "trajectory_w": WEIGHTS,
    "turn_w": WEIGHTS,
    "singleton": st.sampled_from(["zero", "score"]),
}


@settings(max_examples=100, deadline=None)
@given(step_rows(), st.fixed_dictionaries(LEVELS))
def test_dual_level_equals_its_naive_twin(rows, params):
    assert_same_credit(
        compute_credit("dual_level", as_batch(rows), **params).advantage, naive.dual_level(rows, **params)
    )


def credit_dual_level(reward, trajectory, **params):
    return compute_credit("dual_level", table(reward, trajectory), **params)


def test_dual_level_check_values():
    """Turn rewards 1, 0 and 0, 0, averaged as in the released code."""
    got = credit_dual_level([1, 0, 0, 0], list("aabb"), trajectory_w=0.5, turn_w=0.5).advantage
    np.testing.assert_allclose(got, [0.7071, 0.3536, -0.7071, -0.3536], atol=1e-4)


@pytest.mark.parametrize(("singleton", "lone"), [("zero", 0.0), ("score", 2.0)])
def test_a_turn_that_no_other_member_has(singleton, lone):
    got = credit_dual_level([1, 2, 0], list("aab"), trajectory_w=0.0, singleton=singleton)
    assert got.advantage[1] == lone
    assert got.returns.tolist() == [1 + 0.9 * 2, 2, 0]


# --- step_episode: the check value, its twin, the three normalisers, and the released code's baseline -----------------
ESTIMATORS = ["rloo", "grpo", "reinforce_pp"]
PARAMS_STEP_EPISODE = {
    "alpha": st.sampled_from([0.0, 0.5, 1.0]),
    "estimator": st.sampled_from(ESTIMATORS),
    "baseline": st.sampled_from(["all_steps", "one_per_trajectory"]),
}


@settings(max_examples=100, deadline=None)
@given(step_rows("turn_score"), st.fixed_dictionaries(PARAMS_STEP_EPISODE))
def test_step_episode_equals_its_naive_twin(rows, params):
    # one score per trajectory, as the twin counts it once
    outcome = {row["trajectory"]: row.get("score") for row in rows}
    rows = [row if outcome[row["trajectory"]] is None else {**row, "score": outcome[row["trajectory"]]} for row in rows]
    got = compute_credit("step_episode", as_batch(rows), **params).advantage
    assert_same_credit(got, naive.step_episode(rows, **params))


def credit_step_episode(reward, score, trajectory=None, **params):
    return compute_credit("step_episode", table(reward, trajectory, turn_score=score), **params)


def test_check_value_of_the_episode_term():
    got = credit_step_episode([1, 0, 0, 0], [0.5] * 4).advantage
    np.testing.assert_allclose(got, [1, -1 / 3, -1 / 3, -1 / 3], atol=1e-12)


@pytest.mark.parametrize(
    ("baseline", "expected"),
    # all: each score less the mean of the other two; one: 2 (q - mean of 1 and 0)
    [("all_steps", [0.0, 1.5, -1.5]), ("one_per_trajectory", [1.0, 3.0, -1.0])],
)
def test_step_scores_by_hand(baseline, expected):
    got = credit_step_episode([0, 0, 0], [1, 2, 0], list("aab"), baseline=baseline).advantage
    np.testing.assert_allclose(got, expected, atol=1e-12)


# --- step_potential: the check values of SPAE, its twin, and what is counted over tokens ------------------------------
PARAMS_STEP_POTENTIAL = {
    "alpha": st.sampled_from([0.0, 0.5, 1.0]),
    "xi": st.sampled_from([0.0, 0.5]),
    "saturation": st.sampled_from([0.4, 0.9]),
}
ROWS_STEP_POTENTIAL = st.one_of(step_rows("potential", "valid", "tokens"), step_rows("potential", "valid"))


@settings(max_examples=100, deadline=None)
@given(ROWS_STEP_POTENTIAL, st.fixed_dictionaries(PARAMS_STEP_POTENTIAL))
def test_step_potential_equals_its_naive_twin(rows, params):
    got = compute_credit("step_potential", as_batch(rows), **params).advantage
    np.testing.assert_allclose(got, naive.step_potential(rows, **params), rtol=1e-6, atol=1e-6)


def test_step_potential_check_values():
    np.testing.assert_allclose(saturation_factor(np.array([0, 1, 3]), 0.5), [1, 0.6839, 0.5249], atol=1e-4)
    np.testing.assert_allclose(potential(np.array([1.0, 0, 1]), np.array([1.0, 1, 0])), [1, -1, 0.5])


def test_an_example_by_hand():
    """One solved episode, saturated after its first step, and one failed: shaped 0.5, 0.5 f and -0.5, no gain."""
    got = compute_credit("step_potential", table([0, 1, 0], "aab", potential=[0.95, 0.95, 0.0]), xi=0.0)
    shaped = np.array([0.5, 0.5 * (0.5 + 0.5 * np.exp(-1)), -0.5])
    assert_same_credit(got.advantage, (shaped - shaped.mean()) / (shaped.std(ddof=1) + 1e-6))


# --- turn_norm: the check values of both rules, its twin, and that over the batch it is rebn --------------------------
PARAMS_TURN_NORM = {
    **GAMMA,
    "rule": st.sampled_from(["gtpo", "mt_grpo"]),
    "over": st.sampled_from(["group", "batch"]),
    "turn_w": st.sampled_from([0.0, 0.5, 1.0]),
}


@settings(max_examples=100, deadline=None)
@given(step_rows("turn_score"), st.fixed_dictionaries(PARAMS_TURN_NORM))
def test_turn_norm_equals_its_naive_twin(rows, params):
    # one score per trajectory: a group's values are then the same, whichever row is counted
    outcome = {row["trajectory"]: row.get("score") for row in rows}
    rows = [row if outcome[row["trajectory"]] is None else {**row, "score": outcome[row["trajectory"]]} for row in rows]
    assert_same_credit(compute_credit("turn_norm", as_batch(rows), **params).advantage, naive.turn_norm(rows, **params))


def turns(reward, trajectory, score=None, turn_score=None):
    return table(reward, trajectory, score=score, turn_score=turn_score)


@pytest.mark.parametrize("over", ["group", "batch"])
def test_check_values_of_gtpo(over):
    got = compute_credit("turn_norm", turns([0, -0.1, 1, 0, 0.4], list("aaabb")), over=over)
    np.testing.assert_allclose(got.returns, [0.72, 0.8, 1, 0.36, 0.4], atol=1e-12)
    np.testing.assert_allclose(got.advantage, [0.235141, 0.529067, 1.263882, -1.087526, -0.940563], atol=1e-6)


def test_check_values_of_mt_grpo():
    """T 0.5, 0.2, 0, 0.1 and O 1, 0, 0, 1; then the same episodes in one turn each."""
    turn_score, score = [0.5, 0, 0.2, 0, 0, 0, 0.1, 0], [1, 1, 0, 0, 0, 0, 1, 1]
    got = compute_credit("turn_norm", turns([0] * 8, list("aabbccdd"), score, turn_score), rule="mt_grpo").advantage
    np.testing.assert_allclose(got[::2], [2.253963, -0.865875, -1.791267, 0.403180], atol=1e-6)
    np.testing.assert_allclose(got[1::2], [0.865875, -0.865875, -0.865875, 0.865875], atol=1e-6)
    alone = turns([1, 0, 0, 1], list("abcd"), turn_score=[0.5, 0.2, 0, 0.1])
    got = compute_credit("turn_norm", alone, rule="mt_grpo").advantage
    np.testing.assert_allclose(got, [1.116425, -0.697766, -0.976872, 0.558213], atol=1e-6)


def test_what_mt_grpo_lacks_is_named():
    with pytest.raises(ConfigError, match=r"'turn_norm' needs the column 'extra\.turn_score'.*record field"):
        compute_credit("turn_norm", turns([1, 0], list("ab")), rule="mt_grpo")


# --- information_gain: the check values of both pools, its twin, and logarithms ---------------------------------------
PARAMS_INFORMATION_GAIN = {
    **GAMMA,
    "gain": st.sampled_from(["probability", "log_probability"]),
    "pool": st.sampled_from(["joint", "separate"]),
}


@settings(max_examples=100, deadline=None)
@given(step_rows("gold_probability"), st.fixed_dictionaries(PARAMS_INFORMATION_GAIN))
def test_information_gain_equals_its_naive_twin(rows, params):
    got = compute_credit("information_gain", as_batch(rows), **params).advantage
    assert_same_credit(got, naive.information_gain(rows, **params))


def golden(probability, outcome=(1, 0)):
    """Episode a with three turns, b with two."""
    return table([0, 0, outcome[0], 0, outcome[1]], "aaabb", gold_probability=probability)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        ("separate", [2.336293, 1.267257, 0.999998, -2.336293, -0.999998]),
        ("joint", [1.476057, 1.577854, 1.934144, -1.476057, -0.610782]),
    ],
)
def test_information_gain_check_values(pool, expected):
    """Gains 0.2, 0.1 and -0.1, outcomes 1 and 0."""
    got = compute_credit("information_gain", golden([0.3, 0.5, 0.6, 0.4, 0.3]), pool=pool).advantage
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_logarithms_compare_ratios():
    got = compute_credit("information_gain", golden([0.1, 0.2, 0.4, 0.5, 1.0]), pool="separate", gain="log_probability")
    np.testing.assert_allclose(got.advantage, [1, 1, 1, -1, -1], atol=1e-5)  # each gain is log 2


def test_the_probability_before_the_only_turn_is_not_read():
    alone = table([0, 1, 0], [0, 0, 1], gold_probability=[0.3, 0.4, 0.0])
    got = compute_credit("information_gain", alone, gain="log_probability").advantage
    np.testing.assert_allclose(got, [1, 1, -1], atol=1e-5)


@pytest.mark.parametrize(("pool", "expected"), [("separate", [0, 0]), ("joint", [0, 1])])
def test_equal_episodes(pool, expected):
    """Gains 0.1, outcomes 1: in a joint pool they differ, and what sums to 0 but for rounding is 0."""
    twice = table([0, 1] * 2, "aabb", gold_probability=[0.3, 0.4] * 2)
    got = compute_credit("information_gain", twice, pool=pool).advantage
    assert got[[0, 2]].tolist() == [0, 0]
    np.testing.assert_allclose(got, expected * 2, atol=1e-5)


def test_a_logarithm_of_nothing_is_named():
    with pytest.raises(ConfigError, match=r"gold_probability above 0, got 0 in row 3, trajectory 'b', step 0"):
        compute_credit("information_gain", golden([0.3, 0.5, 0.6, 0.0, 0.3]), gain="log_probability")


@pytest.mark.parametrize("wrong", [-0.1, 1.1, None])
def test_what_is_no_probability_is_named(wrong):
    with pytest.raises(ConfigError, match=r"extra\.gold_probability: expected a finite number from 0 to 1 .* row 1"):
        compute_credit("information_gain", golden([0.5, wrong, 0.5, 0.5, 0.5]))


# --- rebn: both conventions of the std, its twin, and that the whole batch is one group -------------------------------
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
    rebn = compute_credit("rebn", batch, gamma=case["params"]["gamma"], std=std, epsilon=case["params"]["eps"])
    np.testing.assert_allclose(rebn.advantage, case["expected"][expected], rtol=0, atol=2e-5)
    np.testing.assert_allclose(rebn.returns, np.concatenate(case["expected"]["returns"]), rtol=0, atol=2e-5)


@settings(max_examples=100, deadline=None)
@given(
    step_rows(),
    st.fixed_dictionaries(
        {**GAMMA, "std": st.sampled_from(["sample", "population"]), "epsilon": st.sampled_from([1e-9, 1e-3])}
    ),
)
def test_rebn_equals_its_naive_twin(rows, params):
    assert_same_credit(compute_credit("rebn", as_batch(rows), **params).advantage, naive.rebn(rows, **params))


def rebn(reward, trajectory=None, penalty=None, **params):
    return compute_credit("rebn", table(reward, trajectory, penalty=penalty), **params)


def test_hand_example():
    np.testing.assert_allclose(rebn([1.0, 0.0]).advantage, [0.5**0.5, -(0.5**0.5)], atol=1e-8)
    np.testing.assert_allclose(rebn([1.0, 0.0], std="population").advantage, [1, -1], atol=1e-8)
    got = rebn([0.0, 1.0, 0.0], list("aab"))
    assert got.returns.tolist() == [0.9, 1.0, 0.0]
    mean, std = 1.9 / 3, np.std([0.9, 1.0, 0.0], ddof=1)
    np.testing.assert_allclose(got.advantage, (np.array([0.9, 1.0, 0.0]) - mean) / std, atol=1e-8)


def test_penalty_stays_on_its_own_step():
    got = rebn([0.0, 1.0], list("aa"), penalty=[0.0, 0.5])
    assert got.returns.tolist() == [0.9, 0.5]
