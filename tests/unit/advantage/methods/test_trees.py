"""Methods on trees of steps: numbers of papers, their twins, and their edge cases."""

import naive
import numpy as np
import pytest
from estimator_cases import NORM, as_batch, assert_same_credit, step_rows, table, with_numeric_parents, with_parents
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit

# --- tree: the check values, its twin, the two ways to hand over a tree, and keys that make none ----------------------
RULE = st.sampled_from(["siblings", "treerl", "tree_grpo", "arpo", "spo"])
SHARED = st.sampled_from(["mean", "sum"])
WEIGHT = st.sampled_from([0.0, 0.5, 1.0])


@settings(max_examples=60, deadline=None)
@given(
    step_rows("action").flatmap(
        lambda rows: st.sampled_from([with_parents, with_numeric_parents]).map(lambda f: f(rows))
    ),
    st.fixed_dictionaries({**NORM, "rule": RULE, "shared": SHARED, "trajectory_w": WEIGHT, "fork_w": WEIGHT}),
)
def test_tree_equals_its_naive_twin(rows, params):
    credit_tree = compute_credit("tree", as_batch(rows), **params)
    assert_same_credit(credit_tree.advantage, naive.tree(rows, **params))


def credit_tree(parent, outcomes, trajectory=None, step=None, valid=None, **params):
    batch = table(outcomes, trajectory, step=step, valid=valid, parent=parent)
    return compute_credit("tree", batch, **params).advantage


def test_check_values_of_tree_grpo():
    """Trees {1 0 0} {0 1 1}."""
    got = credit_tree(["one"] * 3 + ["two"] * 3, [1, 0, 0, 0, 1, 1], rule="tree_grpo")
    np.testing.assert_allclose(got, [2.067568, -1.490219, -1.490219, -2.067568, 1.490219, 1.490219], atol=1e-6)


def test_check_values_of_arpo():
    """Leaves 1, 0, 0, 0, of which the first two share x: by the sample std 1.5 and -0.5, and x has their mean."""
    tree = {"parent": ["start", "x", "x", "start", "start"], "trajectory": [*"aabcd"], "step": [0, 1, 0, 0, 0]}
    for shared, x in (("mean", 0.5), ("sum", 1.0)):
        got = credit_tree(**tree, outcomes=[0, 1, 0, 0, 0], rule="arpo", shared=shared)
        np.testing.assert_allclose(got, [x, 1.5, -0.5, -0.5, -0.5], atol=1e-5)


#: start -> x -> (won, lost), start -> y (lost); once with x in one trajectory, once in both
FORK = {"parent": ["start", "x", "x", "start"], "trajectory": [*"aabc"], "step": [0, 1, 0, 0], "outcomes": [0, 1, 0, 0]}
COPIES = {
    "parent": ["start", "x", "start", "x", "start"],
    "trajectory": [*"aabbc"],
    "step": [0, 1, 0, 1, 0],
    "outcomes": [0, 1, 0, 0, 0],
}


@pytest.mark.parametrize(
    ("rule", "x", "won", "lost", "y"),
    [
        # V: x 1/2, won 1, lost 0, y 0; mean of the leaves 1/3
        ("siblings", 1 / 6 + 1 / 4, 2 / 3 + 1 / 2, -1 / 3 - 1 / 2, -1 / 3 - 1 / 4),
        ("treerl", 2 * (1 / 6) / 2**0.5, 2 / 3 + 1 / 2, -1 / 3 - 1 / 2, -2 / 3),
        ("tree_grpo", 1 / 3, 4 / 3, -2 / 3, -2 / 3),
        ("arpo", 1 / 6, 2 / 3, -1 / 3, -1 / 3),
        # x against the mean of x and y, 1/4
        ("spo", 1 / 4, 1 / 2, -1 / 2, -1 / 4),
    ],
)
def test_a_fork_by_hand(rule, x, won, lost, y):
    np.testing.assert_allclose(credit_tree(**FORK, rule=rule, norm="mean"), [x, won, lost, y], atol=1e-12)
    np.testing.assert_allclose(credit_tree(**COPIES, rule=rule, norm="mean"), [x, won, x, lost, y], atol=1e-12)


def test_check_values_of_a_tree_by_the_means_of_children():
    """Nodes with the leaves {1 1}, {1 0} and {0 0}: 1, 1/2 and 0 against their mean, and each leaf against its node."""
    tree = {"parent": [*"sxxsyyszz"], "trajectory": [*"aabcceffh"], "step": [0, 1, 0, 0, 1, 0, 0, 1, 0]}
    outcomes = [0, 1, 1, 0, 1, 0, 0, 0, 0]
    got = credit_tree(**tree, outcomes=outcomes, rule="spo")
    np.testing.assert_allclose(got, [0.999998, 0, 0, 0, 0.707106, -0.707106, -0.999998, 0, 0], atol=1e-6)
    got = credit_tree(**tree, outcomes=outcomes, rule="spo", norm="mean")
    np.testing.assert_allclose(got, [0.5, 0, 0, 0, 0.5, -0.5, -0.5, 0, 0], atol=1e-12)


def test_a_refused_action_is_one_node_with_the_step_that_got_on():
    """Start, refused at x, on from x and won; start, lost at x. V of the first step 1/2, and the step is shared."""
    columns = {"trajectory": [*"aaabb"], "step": [0, 1, 2, 0, 1], "norm": "mean"}
    got = credit_tree(["", "x", "x", "", "x"], [0, 0, 1, 0, 0], **columns)
    np.testing.assert_allclose(got, [0, 1, 1, 0, -1], atol=1e-12)


def test_keys_may_be_numbers_the_0_too():
    got = credit_tree([0.0, 0.0, 7.0, 7.0], [1, 0, 1, 0], valid=[False, True, True, True], norm="mean", trajectory_w=0)
    np.testing.assert_allclose(got, [0.5, -0.5, 0.5, -0.5], atol=1e-12)


@pytest.mark.parametrize("none", [None, float("nan")])
def test_a_step_without_a_key_is_named(none):
    with pytest.raises(ConfigError, match=r"extra\.parent: row 1, trajectory 1, step 0: it has no key: expected"):
        credit_tree(["x", none], [1, 0])


def test_a_branch_that_begins_at_the_fork_has_the_mean_of_what_was_earned_on_the_way():
    """The step to x earned 4 and 2: the third trajectory, which begins at x, has 3 from it."""
    columns = {"trajectory": [*"aabbc"], "step": [0, 1, 0, 1, 0], "norm": "mean", "trajectory_w": 0}
    got = credit_tree(["", "x", "", "x", "x"], [4, 0, 2, 0, 1], **columns)
    np.testing.assert_allclose(got, np.array([0, 4 - 10 / 3, 0, 2 - 10 / 3, 4 - 10 / 3]), atol=1e-12)


def test_the_outcome_that_a_branch_brings_along_is_its_own():
    """The shared step earned 4 by what came of the first way through; the second one ends with 1 in all."""
    shared = {"group": [0] * 3, "trajectory": [*"aab"], "step": [0, 1, 1], "reward": [4, 0, 1]}
    extra = {"parent": ["", "x", "x"]}
    rebuilt = compute_credit("tree", StepBatch(**shared, extra=extra), norm="mean", trajectory_w=0).advantage
    batch = StepBatch(**shared, extra=extra | {"leaf_outcome": [4.0, 4.0, 1.0]})
    assert rebuilt.tolist() == [0, -0.5, 0.5]
    assert compute_credit("tree", batch, norm="mean", trajectory_w=0).advantage.tolist() == [0, 1.5, -1.5]


@pytest.mark.parametrize("rule", ["siblings", "treerl", "tree_grpo", "arpo", "spo"])
def test_leaves_that_differ_by_rounding_are_equal(rule):
    got = credit_tree([*["s"] * 3, *["t"] * 3], [0.1 + 0.2, 0.3, 0.3, 0.3, 0.3, 0.1 + 0.2], rule=rule)
    assert not got.any()


@pytest.mark.parametrize(
    ("parent", "trajectory", "step", "what"),
    [
        (["r", "s", "r", "q"], [0, 0, 0, 1], [0, 1, 2, 0], "comes back to itself"),
        (["r", "s", "q", "s"], [0, 0, 1, 1], [0, 1, 0, 1], "also taken after another step"),
        (["r", "s", "s", "r"], [0, 0, 1, 1], [0, 1, 0, 1], "comes back to itself"),
    ],
)
def test_keys_that_make_no_tree(parent, trajectory, step, what):
    """What happens with keys of states, which paths meet in or come back to."""
    with pytest.raises(ConfigError, match=rf"extra\.parent: row \d, trajectory \d, step \d: .*{what}"):
        credit_tree(parent, [0.0] * 4, trajectory=trajectory, step=step)


# --- siblings: the check values, its twin, and columns that are none --------------------------------------------------
@settings(max_examples=60, deadline=None)
@given(step_rows("action", "candidate_score").map(with_parents), st.fixed_dictionaries(NORM))
def test_siblings_equals_its_naive_twin(rows, params):
    credit_siblings = compute_credit("siblings", as_batch(rows), **params)
    assert_same_credit(credit_siblings.advantage, naive.siblings(rows, **params))


def credit_siblings(parent, scores, **columns):
    batch = table([0] * len(scores), parent=parent, candidate_score=scores, **columns)
    return compute_credit("siblings", batch).advantage


def test_check_values_of_slate():
    got = credit_siblings(["start"] * 5, [2, 1, 0, 0, -1])
    np.testing.assert_allclose(got, [1.4033, 0.5262, -0.3508, -0.3508, -1.2279], atol=1e-4)


def test_only_candidates_for_the_same_turn_of_the_same_group_are_compared():
    got = credit_siblings([*"xxyzx"], [1, 0, 7, 3, 9], group=[0, 0, 0, 0, 1])
    np.testing.assert_allclose(got, [0.5**0.5, -(0.5**0.5), 0, 0, 0], atol=1e-5)
    assert credit_siblings(["x"] * 3, [0.1, 0.1, 0.1], penalty=[0, 0.5, 0]).tolist() == [0, -0.5, 0]


def test_every_step_has_a_key_and_a_score():
    with pytest.raises(ConfigError, match=r"extra\.parent: row 1 has no key"):
        credit_siblings(["x", None], [1, 2])
    with pytest.raises(ConfigError, match=r"extra\.candidate_score: expected a finite number"):
        credit_siblings(["x", "x"], [1, float("nan")])
