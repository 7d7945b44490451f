"""proxmo: the reference's three modes, the hand example, its twin, success rates, neighbours and texts."""

import math

import naive
import numpy as np
import pytest
from estimator_cases import (
    EPISODE,
    GAMMA,
    NORMS,
    TOLERANCE,
    as_batch,
    assert_rows,
    assert_same_credit,
    cases,
    columns,
    oracle_batch,
    step_rows,
    table,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit
from verl_turnkey.advantage.methods.proxmo import success_rates

REFERENCE = {"scope": "steps", "singleton": "score", "success_rate": "clamped_score", "neighbours": "all_steps"}


def reference(case, **params):
    ours = {
        "gamma": "gamma",
        "alpha": "psc_alpha",
        "beta": "psc_beta",
        "epsilon": "epsilon",
        "temperature": "softmax_temperature",
        "max_features": "tfidf_max_features",
        "step_advantage_w": "step_advantage_w",
    }
    own = {name: case["params"][theirs] for name, theirs in ours.items()}
    return compute_credit("proxmo", oracle_batch(case), **{**own, **REFERENCE, **params})


@pytest.mark.parametrize("case", cases("proxmo"))
def test_equals_the_reference_with_soft_groups(case):
    expected = case["expected"]["soft_grouping"]
    credit = reference(case, norm="mean")
    assert_rows(credit.advantage, expected["advantages"], case, 2e-5)
    np.testing.assert_allclose(credit.returns, case["inputs"]["step_returns"], rtol=0, atol=2e-5)
    episode = reference(case, norm="mean", step_advantage_w=0).advantage
    assert_rows(episode, expected["episode_adv"], case, 2e-5)
    step = reference(case, norm="mean", step_advantage_w=1).advantage - episode
    assert_rows(step, expected["step_adv"], case, 2e-5)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", cases("proxmo"))
def test_episode_level_equals_the_reference_with_hard_groups(case, norm):
    expected = case["expected"][NORMS[norm]]["episode_adv"]
    assert_rows(reference(case, norm=norm, step_advantage_w=0).advantage, expected, case, TOLERANCE[norm])


PARAMS = {
    **EPISODE,
    **GAMMA,
    "alpha": st.sampled_from([0.5, 1.0, 4.0, 5.5]),
    "beta": st.sampled_from([0.0, 0.1, 0.866]),
    "temperature": st.sampled_from([0.02, 0.1, 5.0]),
    "step_advantage_w": st.sampled_from([0.0, 0.5, 1.0]),
    "success_rate": st.sampled_from(["trajectories", "clamped_score"]),
    "neighbours": st.sampled_from(["same_step", "all_steps"]),
}


@settings(max_examples=80, deadline=None)
@given(step_rows("anchor", "success", "text"), st.fixed_dictionaries(PARAMS))
def test_equals_its_naive_twin(rows, params):
    assert_same_credit(compute_credit("proxmo", as_batch(rows), **params).advantage, naive.proxmo(rows, **params))


@settings(max_examples=40, deadline=None)
@given(
    step_rows("success").flatmap(
        lambda rows: st.lists(
            st.sampled_from(["red mug", "Red  mug, red lamp", "a", "blue lamp", 37, (37, 55), None]),
            min_size=len(rows),
            max_size=len(rows),
        ).map(lambda anchors: [{**row, "anchor": a} for row, a in zip(rows, anchors, strict=True)])
    ),
    st.fixed_dictionaries(PARAMS),
)
def test_equals_its_naive_twin_on_anchors_of_any_kind(rows, params):
    assert_same_credit(compute_credit("proxmo", as_batch(rows), **params).advantage, naive.proxmo(rows, **params))


HAND = columns(
    [1.0, 0.0, 0.0, 0.0], success=[True, False, False, False], anchor=["red mug", "red mug", "blue lamp", "blue lamp"]
)


def advantage(rows, **params):
    return compute_credit("proxmo", StepBatch(**rows), **{"norm": "mean", **params}).advantage


def step_level(rows, **params):
    return advantage(rows, **params) - advantage(rows, **params, step_advantage_w=0)


@pytest.mark.parametrize("success_rate", ["trajectories", "clamped_score"])
@pytest.mark.parametrize("neighbours", ["same_step", "all_steps"])
def test_hand_example(success_rate, neighbours):
    params = {"success_rate": success_rate, "neighbours": neighbours}
    episode = [0.755884, -0.249976, -0.249976, -0.249976]
    np.testing.assert_allclose(advantage(HAND, **params, step_advantage_w=0), episode, atol=1e-6)
    step = [0.500023, -0.499977, -0.0000227, -0.0000227]
    np.testing.assert_allclose(step_level(HAND, **params), step, atol=1e-6)
    np.testing.assert_allclose(advantage(HAND, **params), [1.255906, -0.749953, -0.249998, -0.249998], atol=1e-6)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_success_rate_of_long_and_short_trajectories_and_of_large_rewards():
    """One of two trajectories succeeds, with reward 10 in one step of four: p = 1/2, or the clamped 1 of the code."""
    rows = columns(
        [10.0, 0.0, 0.0, 0.0], ["win", "loss", "loss", "loss"], success=[True, False, False, False], anchor=[None] * 4
    )
    f = {True: sigmoid(0.5**4) - 0.5, False: sigmoid(-(0.5**4)) - 0.5}
    expected = [5 * (1 + 0.1 * f[True])] + [-5 * (1 + 0.1 * f[False])] * 3
    np.testing.assert_allclose(advantage(rows, step_advantage_w=0), expected, atol=1e-12)
    clamped = advantage(rows, success_rate="clamped_score", step_advantage_w=0)
    np.testing.assert_allclose(clamped, [5.0] + [-5 * (1 + 0.1 * (sigmoid(-1) - 0.5))] * 3, atol=1e-12)
    late = {**rows, "success": [False, False, False, True]}
    expected = [5 * (1 + 0.1 * f[False])] + [-5 * (1 + 0.1 * f[True])] * 3
    np.testing.assert_allclose(advantage(late, step_advantage_w=0), expected, atol=1e-12)


def test_a_score_of_a_half_is_no_success_however_it_was_rounded():
    scores = np.array([1.1 - 0.6, 0.5, 0.501, 1.0])
    assert scores[0] > 0.5
    batch = table(scores)
    assert success_rates(batch, scores, "clamped_score")[1].tolist() == [False, False, True, True]


def test_success_rate_needs_to_know_who_succeeded():
    rows = {name: column for name, column in HAND.items() if name != "success"}
    with pytest.raises(ConfigError, match="success"):
        advantage(rows)
    np.testing.assert_array_equal(
        advantage(rows, success_rate="clamped_score"), advantage(HAND, success_rate="clamped_score")
    )


def test_temperature_and_cosine_by_hand():
    """Cosine 1 to itself and 0 to the other: weight e / (e + 1) at temperature 1."""
    rows = {**HAND, "anchor": ["red", "blue", "green", "white"]}
    e = math.e / (math.e + 3)
    got = step_level(rows, temperature=1.0)
    np.testing.assert_allclose(got, [1 - e] + [-1 / (math.e + 3)] * 3, atol=1e-12)
    # Two documents "red mug", "red": idf of red = 1, of mug = ln(3 / 2) + 1.
    rows = {name: column[:2] for name, column in HAND.items()} | {"anchor": ["red mug", "RED"]}
    cosine = 1 / math.hypot(1, math.log(1.5) + 1)
    to_other = sigmoid(cosine - 1)
    np.testing.assert_allclose(step_level(rows, temperature=1.0), [to_other, -to_other], atol=1e-12)


def test_only_the_most_frequent_terms_count():
    """With one term, red, all texts are the same."""
    rows = {**HAND, "anchor": ["red mug", "red lamp", "blue mug red", "red, red"]}
    np.testing.assert_allclose(step_level(rows, max_features=1), [0.75, -0.25, -0.25, -0.25], atol=1e-12)
    assert abs(step_level(rows)[0] - 0.75) > 0.01


def test_without_words_there_is_no_step_level():
    for anchor in ([None] * 4, ["", "a", "!", "7"], [1, 2, 3, 4]):
        assert step_level({**HAND, "anchor": anchor}).tolist() == [0] * 4


def test_a_text_without_known_words_is_equally_far_from_all():
    rows = {**HAND, "anchor": ["!", "red mug", "red mug", "red mug"]}
    for temperature in (0.1, 1e-4):  # at the lower one exp(-1 / temperature) is 0
        assert step_level(rows, temperature=temperature)[0] == pytest.approx(0.75, abs=1e-12)


def test_states_with_different_images_are_not_compared():
    """Red mug and blue lamp are drawn: what is written is the same everywhere."""
    drawn = {**HAND, "anchor": ["you see:"] * 4, "extra": {"images": ["mug", "mug", "lamp", "lamp"]}}
    written = {**HAND, "anchor": ["you see:"] * 4}
    assert HAND["reward"] == [1.0, 0.0, 0.0, 0.0]
    assert step_level(drawn).tolist() == [0.5, -0.5, 0, 0]
    assert step_level(written).tolist() == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("block", [1, 7, 100])
def test_blocks_of_the_similarity_matrix_make_the_whole(block, monkeypatch):
    rows = {"group": [0] * 6, "trajectory": list(range(6)), "step": [0] * 6, "reward": [0.0, 1.0, 2.0, 0.0, 5.0, 1.0]}
    words = ["red mug", "red lamp", "blue lamp", "blue mug", "old red key", "key"]
    batch = StepBatch(**rows, anchor=words, success=[False] * 6)
    whole = compute_credit("proxmo", batch).advantage
    monkeypatch.setattr("verl_turnkey.advantage.methods.proxmo.BLOCK", block)
    np.testing.assert_allclose(compute_credit("proxmo", batch).advantage, whole, rtol=1e-12)


def test_a_score_of_one_half_is_no_success_however_it_is_summed():
    rewards = [1.0, -0.3, -0.3, 0.1, 0.1, -0.1]
    sums = []
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [0, 3, 4, 1, 2, 5]):
        batch = table([*(rewards[i] for i in order), 0.0], "aaaaaab", anchor=["s"] * 7)
        sums.append(batch.score[0])
        credit = compute_credit(
            "proxmo", batch, success_rate="clamped_score", beta=1.0, alpha=1.0, step_advantage_w=0.0
        )
        assert credit.advantage[0] < 1 / np.sqrt(2), "an outcome that failed weighs less than 1"
    assert len(set(sums)) > 1, "the orders must differ in their rounding"
