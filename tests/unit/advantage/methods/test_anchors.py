"""Methods that compare steps in equal states: the references, their twins, and their edge cases."""

import random

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
)
from hypothesis import given, settings
from hypothesis import strategies as st
from naive.anchors import similarity_clusters

from verl_turnkey.advantage import StepBatch, compute_credit
from verl_turnkey.advantage.group_ops import discounted_returns

# --- gigpo: the reference, the paper's example, its twin, and grouping by similar texts -------------------------------
PARAMS = st.fixed_dictionaries({**EPISODE, **GAMMA, "step_advantage_w": st.sampled_from([0.0, 0.5, 1.0])})


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", [*cases("gigpo"), *cases("gigpo_structured_anchor")])
def test_gigpo_equals_the_reference(case, norm):
    params, expected = case["params"], case["expected"][NORMS[norm]]
    common = {"gamma": params["gamma"], "norm": norm, "singleton": "score", "epsilon": params["epsilon"]}
    batch = oracle_batch(case)
    credit = compute_credit("gigpo", batch, scope="steps", step_advantage_w=params["step_advantage_w"], **common)
    assert_rows(credit.advantage, expected["advantages"], case, TOLERANCE[norm])
    np.testing.assert_allclose(credit.returns, case["inputs"]["step_returns"], rtol=0, atol=2e-5)
    if "episode_adv" in expected:
        episode = compute_credit("gigpo", batch, scope="steps", step_advantage_w=0, **common).advantage
        assert_rows(episode, expected["episode_adv"], case, TOLERANCE[norm])
        with_step = compute_credit("gigpo", batch, scope="steps", step_advantage_w=1, **common).advantage
        assert_rows(with_step - episode, expected["step_adv"], case, TOLERANCE[norm])
        paper = compute_credit("gigpo", batch, scope="trajectories", step_advantage_w=0, **common).advantage
        assert_rows(paper, expected["episode_adv_per_trajectory_stats"], case, TOLERANCE[norm])


@pytest.mark.parametrize("case", cases("step_discounted_returns"))
def test_discounted_returns_equal_the_reference(case):
    inputs = case["inputs"]
    trajectories = inputs["traj_uid"]
    batch = StepBatch(
        group=["g"] * len(trajectories),
        trajectory=trajectories,
        step=inputs["step_idx"],
        reward=inputs["raw_step_reward"],
    )
    got = discounted_returns(batch.reward, batch.runs, case["params"]["gamma"])
    np.testing.assert_allclose(got, case["expected"]["step_returns"], rtol=0, atol=2e-5)


@settings(max_examples=150, deadline=None)
@given(step_rows("anchor"), PARAMS)
def test_gigpo_equals_its_naive_twin(rows, params):
    credit = compute_credit("gigpo", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.gigpo(rows, **params))


HAND = columns([0.0, 10.0, 0.0, 0.0, 0.0], ["t0", "t0", "t1", "t1", "t1"], anchor=["A", "B", "A", "C", "A"])


def test_hand_example_of_the_paper_and_of_its_code():
    batch = StepBatch(**HAND)
    code = compute_credit("gigpo", batch, norm="mean", scope="steps")
    assert code.returns.tolist() == [9.5, 10.0, 0.0, 0.0, 0.0]
    np.testing.assert_allclose(code.advantage, [37 / 3, 6, -43 / 6, -4, -43 / 6], atol=1e-12)
    code = compute_credit("gigpo", batch, norm="mean_std", scope="steps").advantage
    np.testing.assert_allclose(code, [2.250145, 1.095445, -1.307647, -0.730297, -1.307647], atol=1e-6)
    paper = compute_credit("gigpo", batch, norm="mean").advantage
    np.testing.assert_allclose(paper, [5 + 19 / 3, 5, -5 - 19 / 6, -5, -5 - 19 / 6], atol=1e-12)


def test_metrics_of_the_hand_example():
    metrics = compute_credit("gigpo", StepBatch(**HAND)).metrics
    assert metrics["credit/groups"] == 1
    assert metrics["credit/anchor_groups"] == 3
    assert metrics["credit/anchor_group_size/mean"] == pytest.approx(5 / 3)
    assert metrics["credit/anchor_group_size/max"] == 3
    assert metrics["credit/share_steps_in_anchor_groups"] == pytest.approx(0.6)
    assert metrics["credit/share_steps_with_step_credit"] == pytest.approx(0.6)
    assert metrics["credit/episode_level/share_nonzero"] == 1
    assert metrics["credit/step_level/mean"] == pytest.approx(0, abs=1e-9)
    assert metrics["credit/step_level/std"] > 0


def test_none_never_matches_and_equal_states_of_two_groups_do_not_either():
    rows = {**HAND, "anchor": [None] * 5}
    assert compute_credit("gigpo", StepBatch(**rows)).metrics["credit/share_steps_in_anchor_groups"] == 0
    rows = {**HAND, "group": ["g", "g", "h", "h", "h"], "anchor": ["A", "B", "A", "C", "D"]}
    assert compute_credit("gigpo", StepBatch(**rows)).metrics["credit/share_steps_in_anchor_groups"] == 0


def test_penalty_stays_on_its_own_step():
    batch = StepBatch(**HAND, penalty=[0, 0.5, 0, 0, 0])
    assert compute_credit("gigpo", batch).returns.tolist() == [9.5, 9.5, 0, 0, 0]


# Grouping by similar texts


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", cases("gigpo_similarity"))
def test_similarity_equals_the_reference(case, norm):
    params = case["params"]
    credit = compute_credit(
        "gigpo",
        oracle_batch(case),
        gamma=params["gamma"],
        step_advantage_w=params["step_advantage_w"],
        norm=norm,
        scope="steps",
        singleton="score",
        similarity=params["similarity_thresh"],
        epsilon=params["epsilon"],
    )
    assert_rows(credit.advantage, case["expected"][NORMS[norm]]["advantages"], case, TOLERANCE[norm])


@pytest.mark.parametrize("case", cases("gigpo_similarity"))
def test_clusters_of_the_naive_twin_are_those_of_the_reference(case):
    rows = [
        {"group": group, "anchor": anchor}
        for group, anchor in zip(case["inputs"]["uid"], case["inputs"]["anchor_obs"], strict=True)
    ]
    number = {}
    clusters = similarity_clusters(rows, case["params"]["similarity_thresh"])
    assert [number.setdefault(cluster, len(number)) for cluster in clusters] == case["step_group"]


def test_states_with_different_images_are_not_similar():
    rows = columns(
        [1.0, 0.0, 0.0, 0.0],
        anchor=["s"] * 4,
        text=["you see a mug", "you see a mug!", "you see a mug", "you see a mug"],
        extra={"images": ["mug", "mug", "lamp", "lamp"]},
    )
    credit = compute_credit("gigpo", StepBatch(**rows), similarity=0.9, norm="mean")
    assert credit.parts["step_level"].tolist() == [0.5, -0.5, 0, 0]
    del rows["extra"]
    credit = compute_credit("gigpo", StepBatch(**rows), similarity=0.9, norm="mean")
    assert credit.parts["step_level"].tolist() == [0.75, -0.25, -0.25, -0.25]


@settings(max_examples=60, deadline=None)
@given(step_rows("text"), PARAMS, st.sampled_from([0.05, 0.5, 0.9, 0.96, 0.999]))
def test_similarity_equals_its_naive_twin(rows, params, similarity):
    rows = [{**row, "anchor": "not looked at"} for row in rows]
    credit = compute_credit("gigpo", as_batch(rows), similarity=similarity, **params)
    assert_same_credit(credit.advantage, naive.gigpo(rows, similarity=similarity, **params))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(alphabet="abc ", max_size=6), min_size=2, max_size=12), st.sampled_from([0.3, 0.5, 2 / 3, 0.8]))
def test_similarity_at_the_threshold_and_of_short_texts(texts, similarity):
    rows = one_step_each(texts)
    credit = compute_credit("gigpo", as_batch(rows), similarity=similarity, norm="mean")
    assert_same_credit(credit.advantage, naive.gigpo(rows, similarity=similarity, norm="mean"))


@pytest.mark.parametrize("similarity", [0.6, 0.8, 0.9, 0.95])
def test_similarity_of_long_texts(similarity):
    """From 200 characters on difflib ignores the popular ones ("autojunk"), which changes the ratio."""
    draw = random.Random(0)
    words = ["you", "see", "a", "red", "blue", "door", "key", "box", "ball", "on", "the", "table", "two", "steps"]
    originals = [" ".join(draw.choice(words) for _ in range(80)) for _ in range(3)]
    texts = []
    for _ in range(28):
        text = draw.choice(originals).split()
        for _ in range(draw.choice([0, 1, 4, 12, 25])):
            text[draw.randrange(len(text))] = draw.choice(words)
        texts.append(" ".join(text))
    rows = one_step_each(texts)
    clusters = similarity_clusters(rows, similarity)
    assert 1 < len(set(clusters)) < len(rows), "or this shows nothing"
    credit = compute_credit("gigpo", as_batch(rows), similarity=similarity, norm="mean")
    assert_same_credit(credit.advantage, naive.gigpo(rows, similarity=similarity, norm="mean"))


def one_step_each(texts):
    """One group of one-step trajectories with rewards 1, 2, 4, ...: the step level tells the clusters apart."""
    return [
        {"group": "g", "trajectory": i, "step": 0, "reward": 2.0 ** (i % 40), "penalty": 0.0, "anchor": text}
        for i, text in enumerate(texts)
    ]


def clusters_of(texts, similarity):
    """Which rows share a cluster, read off the credit."""
    batch = as_batch(one_step_each(texts))
    level = {w: compute_credit("gigpo", batch, similarity=similarity, norm="mean", step_advantage_w=w) for w in (0, 1)}
    means = np.round(batch.reward - (level[1].advantage - level[0].advantage), 6).tolist()
    return [means.index(mean) for mean in means]


def test_similarity_is_to_the_text_that_opened_the_cluster():
    """a is like b and b like c, but not a like c: what comes first decides."""
    a, b, c = "aaaaaaaaaa", "aaaaaaaabb", "aaaaaabbbb"
    assert clusters_of([a, b, c], 0.8) == [0, 0, 2]
    assert clusters_of([b, a, c], 0.8) == [0, 0, 0]
    assert clusters_of([a, c, b], 0.8) == [0, 1, 0], "the first match, not the best"


def test_similarity_asks_how_like_the_new_text_is_to_the_old_one():
    """difflib's ratio is not symmetric: ratio(diet, tide) = 0.5, ratio(tide, diet) = 0.25."""
    assert clusters_of(["tide", "diet"], 0.4) == [0, 0]
    assert clusters_of(["diet", "tide"], 0.4) == [0, 1]


@pytest.mark.parametrize("before", [0, 9])
def test_similarity_rules_out_no_text_that_is_just_similar_enough(before):
    """As few runs of one, two and three characters in common as 18 matching ones of 20 allow: every bound is reached.

    Clusters before it take the comparison through the longest common subsequence, too.
    """
    text, other = "abcdefghi", "abcXdefXghi"
    others = [chr(ord("A") + k) * 9 for k in range(before)]
    assert clusters_of([*others, text, other], 18 / 20)[-1] == before
    assert clusters_of([*others, other, text], 18 / 20)[-1] == before
    assert clusters_of([*others, text, other], 18.1 / 20)[-1] == before + 1


def test_similarity_never_matches_none_nor_another_group():
    rows = {**HAND, "text": [None, None, "Nothing happens.", "Nothing happens!", None]}
    metrics = compute_credit("gigpo", StepBatch(**rows), similarity=0.9).metrics
    assert metrics["credit/share_steps_in_anchor_groups"] == pytest.approx(0.4)
    rows = {**HAND, "group": ["g", "g", "h", "h", "h"], "text": ["same", "1", "same", "2", "3"]}
    assert (
        compute_credit("gigpo", StepBatch(**rows), similarity=0.9).metrics["credit/share_steps_in_anchor_groups"] == 0
    )


def test_similarity_needs_texts():
    batch = StepBatch(**{**HAND, "anchor": ["A", "B", ("A", 1), "C", "A"]})
    with pytest.raises(ValueError, match="similarity"):
        compute_credit("gigpo", batch, similarity=0.9)


# --- hgpo: the reference, the hand example with both weightings, its twin, and what a level needs ---------------------
REFERENCE = {"weights": "code", "std": "population", "scope": "steps", "singleton": "score"}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", cases("hgpo"))
def test_hgpo_equals_the_reference(case, norm):
    params = case["params"]
    credit = compute_credit(
        "hgpo",
        oracle_batch(case),
        gamma=params["gamma"],
        history=params["history_length"],
        alpha=params["length_weight_alpha"],
        episode_level=params["base_group"],
        epsilon=params["epsilon"],
        norm=norm,
        **REFERENCE,
    )
    assert_rows(credit.advantage, case["expected"][NORMS[norm]]["advantages"], case, TOLERANCE[norm])
    np.testing.assert_allclose(credit.returns, case["inputs"]["step_returns"], rtol=0, atol=2e-5)


@settings(max_examples=150, deadline=None)
@given(
    step_rows("anchor"),
    st.fixed_dictionaries(
        {
            **EPISODE,
            **GAMMA,
            "history": st.sampled_from([0, 1, 2, 4, 7]),
            "alpha": st.sampled_from([0.0, 1.0, 2.5]),
            "std": st.sampled_from(["population", "sample"]),
            "weights": st.sampled_from(["paper", "code"]),
            "episode_level": st.booleans(),
        }
    ),
)
def test_hgpo_equals_its_naive_twin(rows, params):
    credit = compute_credit("hgpo", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.hgpo(rows, **params))


HAND_HGPO = columns(
    [0.0, 10.0, 0.0, 0.0, 0.0, 4.0], ["t0", "t0", "t1", "t1", "t2", "t2"], anchor=["A", "B", "A", "B", "C", "B"]
)


def hand(**params):
    credit = compute_credit("hgpo", StepBatch(**HAND_HGPO), history=1, **params)
    np.testing.assert_allclose(credit.returns, [9.5, 10, 0, 0, 3.8, 4], atol=1e-12)
    return credit.advantage


def test_hand_example_with_the_weights_of_the_code():
    """Level 0: A {9.5, 0}, B {10, 0, 4}; level 1: AB {10, 0}, and CB alone."""
    expected = [4.75, (2 * 16 / 3 + 3 * 5) / 5, -4.75, -(2 * 14 / 3 + 3 * 5) / 5, 0, -2 / 3]
    np.testing.assert_allclose(hand(norm="mean", weights="code"), expected, atol=1e-5)
    expected = [0.999999, 1.119108, -0.999999, -1.054219, 0, -0.162221]
    np.testing.assert_allclose(hand(weights="code"), expected, atol=2e-6)
    reference = {"weights": "code", "scope": "steps", "episode_level": True}
    expected = [4.944443, 5.166666, -4.722220, -4.833332, -0.666666, -0.666666]
    np.testing.assert_allclose(hand(norm="mean", **reference), expected, atol=2e-6)
    expected = [1.061565, 1.130040, -1.012203, -1.051285, -0.148087]
    np.testing.assert_allclose(hand(**reference)[:5], expected, atol=2e-6)


def test_hand_example_with_the_weights_of_the_paper():
    expected = [4.75, (16 / 3 + 2 * 5) / 3, -4.75, -(14 / 3 + 2 * 5) / 3, 0, -2 / 3]
    np.testing.assert_allclose(hand(norm="mean"), expected, atol=1e-12)
    assert hand(norm="mean")[1] == pytest.approx(5.1111, abs=1e-4)
    expected = [4.75, (16 / 3 + 5) / 2, -4.75, -(14 / 3 + 5) / 2, 0, -2 / 3]
    np.testing.assert_allclose(hand(norm="mean", alpha=0.0), expected, atol=1e-12)
    expected = [4.75, (16 / 3 + 4 * 5) / 5, -4.75, -(14 / 3 + 4 * 5) / 5, 0, -2 / 3]
    np.testing.assert_allclose(hand(norm="mean", alpha=2.0), expected, atol=1e-12)


def test_a_step_that_is_average_but_for_rounding_has_no_say_at_that_level():
    """B is left with 0.1, 0.2 and 0.3, whose mean in floats is not 0.2; after A with 0.2 and 0.3."""
    rows = columns(
        [0.1, 0.0, 0.2, 0.0, 0.3],
        ["t0", "t1", "t1", "t2", "t2"],
        step=[1, 0, 1, 0, 1],
        anchor=["B", "A", "B", "A", "B"],
    )
    assert 0.2 - (0.1 + 0.2 + 0.3) / 3 != 0, "or this shows nothing"
    got = compute_credit("hgpo", StepBatch(**rows), history=1, norm="mean").advantage
    np.testing.assert_allclose(got[2], -0.05, atol=1e-12)
