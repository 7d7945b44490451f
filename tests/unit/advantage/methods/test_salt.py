"""salt: both readings, the hand example, its twin, and when two steps are the same edge."""

import naive
import numpy as np
import pytest
from estimator_cases import NORM, as_batch, assert_same_credit, cases, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch, compute_credit

PARAMS = st.fixed_dictionaries(
    {
        **NORM,
        "base": st.sampled_from(["grpo", "rloo"]),
        "average": st.sampled_from(["occurrences", "trajectories"]),
        "history": st.sampled_from([0, 1, 2, 5]),
    }
)


@pytest.mark.parametrize("average", ["occurrences", "trajectories"])
@pytest.mark.parametrize("case", cases("salt_reconstructed"))
def test_equals_the_reconstruction(case, average):
    inputs = case["inputs"]
    batch = StepBatch(
        group=inputs["uid"],
        trajectory=inputs["traj_uid"],
        step=inputs["step_idx"],
        reward=[0.0] * len(inputs["uid"]),
        score=[inputs["traj_reward"][trajectory] for trajectory in inputs["traj_uid"]],
        anchor=inputs["state"],
        action=inputs["action"],
        extra={"next_anchor": inputs["next_state"]},
    )
    expected = {"occurrences": "mean_over_occurrences", "trajectories": "mean_over_distinct_trajectories"}[average]
    got = compute_credit("salt", batch, average=average).advantage
    np.testing.assert_allclose(got, case["expected"][expected], rtol=0, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(step_rows("anchor", "action", ends=True), PARAMS)
def test_equals_its_naive_twin(rows, params):
    assert_same_credit(compute_credit("salt", as_batch(rows), **params).advantage, naive.salt(rows, **params))


@settings(max_examples=100, deadline=None)
@given(step_rows("anchor", "action", "next_anchor", ends=True), PARAMS)
def test_equals_its_naive_twin_when_the_next_state_is_given(rows, params):
    assert_same_credit(compute_credit("salt", as_batch(rows), **params).advantage, naive.salt(rows, **params))


HAND = {
    "group": ["g"] * 5,
    "trajectory": ["t0", "t0", "t1", "t1", "t2"],
    "step": [0, 1, 0, 1, 0],
    "reward": [0.0, 1.0, 0.0, 0.0, 0.0],
    "anchor": ["s0", "s1", "s0", "s1", "s0"],
    "action": ["a", "b", "a", "c", "d"],
}


def credit(rows, next_anchor=None, **params):
    extra = {} if next_anchor is None else {"next_anchor": next_anchor}
    return compute_credit("salt", StepBatch(**rows, extra=extra), **params).advantage


def test_hand_example():
    """The first edge is common to the winner and a loser; every other one is only walked once."""
    win, loss = 1.154700, -0.577350
    expected = [0.288675, win, 0.288675, loss, loss]
    np.testing.assert_allclose(credit(HAND), expected, atol=2e-6)
    np.testing.assert_allclose(credit(HAND, next_anchor=["s1", "s2", "s1", "s3", "s4"]), expected, atol=2e-6)


def test_leave_one_out_base():
    """n / (n - 1) (R - mean) = 1, -1/2, -1/2; norm and epsilon do not matter."""
    for params in ({}, {"norm": "mean"}, {"epsilon": 1.0}):
        np.testing.assert_allclose(credit(HAND, base="rloo", **params), [0.25, 1, 0.25, -0.5, -0.5], atol=1e-12)


def test_leave_one_out_counts_trajectories_and_the_penalty_is_the_steps_own():
    got = credit({**HAND, "penalty": [0.0, 0.2, 0.0, 0.0, 0.0]}, base="rloo")
    np.testing.assert_allclose(got, [0.25, 1 - 0.2, 0.25, -0.5, -0.5], atol=1e-12)


def test_an_edge_walked_twice_by_one_trajectory():
    """The winner goes round A -x-> A twice, the loser once: two readings of the mean."""
    rows = {
        "group": ["g"] * 5,
        "trajectory": ["t0"] * 3 + ["t1"] * 2,
        "step": [0, 1, 2, 0, 1],
        "reward": [0.0, 0.0, 1.0, 0.0, 0.0],
        "anchor": ["A", "A", "A", "A", "A"],
        "action": ["x", "x", "y", "x", "z"],
    }
    share = 0.5**0.5
    got = credit(rows)
    np.testing.assert_allclose(got, [share / 3, share / 3, share, share / 3, -share], atol=1e-6)
    np.testing.assert_allclose(credit(rows, average="trajectories"), [0, 0, share, 0, -share], atol=1e-6)


def test_an_edge_of_one_trajectory_alone_keeps_its_own_credit():
    """Walked twice, the second time at a cost: nothing to share with others, so nothing is averaged."""
    rows = {
        "group": ["g"] * 4,
        "trajectory": ["t0", "t0", "t0", "t1"],
        "step": [0, 1, 2, 0],
        "reward": [0.0, 0.0, 1.0, 0.0],
        "anchor": ["A", "A", "A", "B"],
        "action": ["x", "x", "y", "z"],
        "penalty": [0.0, 0.5, 0.0, 0.0],
    }
    for average in ("occurrences", "trajectories"):
        assert credit(rows, norm="mean", average=average).tolist() == [0.5, 0.0, 0.5, -0.5]


def two_walks(first, second, won=1.0, **columns):
    """Two trajectories of (state, action) pairs in a group, the first one won."""
    n, m = len(first), len(second)
    return {
        "group": ["g"] * (n + m),
        "trajectory": ["t0"] * n + ["t1"] * m,
        "step": [*range(n), *range(m)],
        "reward": [0.0] * (n - 1) + [won] + [0.0] * m,
        "anchor": [state for state, _ in first + second],
        "action": [action for _, action in first + second],
        **columns,
    }


def merged(rows, next_anchor=None, **params):
    """Which rows share their credit: +1 and -1 before averaging, 0 after."""
    return (credit(rows, next_anchor, base="rloo", **params) == 0).tolist()


def test_history_asks_for_the_same_way_to_get_there():
    rows = two_walks([("A", "x"), ("B", "x"), ("C", "x")], [("A", "y"), ("B", "x"), ("C", "x")])
    assert merged(rows) == [False, True, True] * 2
    assert merged(rows, history=1) == [False, False, True] * 2
    assert merged(rows, history=2) == [False, False, False] * 2


def test_history_knows_the_beginning():
    """The same edge, once as the first step and once after another: not the same way to get there."""
    rows = two_walks([("A", "x"), ("B", "x")], [("Z", "x"), ("A", "x"), ("B", "x")])
    assert merged(rows) == [True, True, False, True, True]
    assert merged(rows, history=1) == [False, True, False, False, True]
    assert merged(rows, history=2) == [False] * 5
    rows = two_walks([("Z", "x"), ("A", "x"), ("B", "x")], [("A", "x"), ("B", "x")])
    assert merged(rows, history=1) == [False, False, True, False, True]
    same = two_walks([("A", "x"), ("B", "x")], [("A", "x"), ("B", "x")])
    assert merged(same, history=9) == [True] * 4


def test_the_end_is_a_state_of_its_own():
    """(A, x) ends the one trajectory; the other goes on to B, or to a state that is not known."""
    for following in ("B", None):
        rows = two_walks([("A", "x")], [("A", "x"), (following, "x")])
        assert merged(rows) == [False, False, False]
    assert merged(two_walks([("A", "x")], [("A", "x")])) == [True, True]


@pytest.mark.parametrize("next_anchor", [None, [None] * 2, ["B"] * 2])
def test_a_solved_end_is_not_one_with_an_end_at_a_limit(next_anchor):
    """Both did x in A last, one solved the task with it, the other had no turn left: what they share is not credit."""
    last = two_walks([("A", "x")], [("A", "x")])
    assert merged(last, next_anchor) == [True, True]
    assert merged({**last, "terminated": [True, False], "truncated": [False, True]}, next_anchor) == [False, False]
    assert merged({**last, "terminated": [True, True]}, next_anchor) == [True, True]
    assert merged({**last, "truncated": [True, True]}, next_anchor) == [True, True]


def test_a_given_next_state_merges_an_end_at_a_limit_with_those_who_went_on():
    rows = two_walks([("A", "x"), ("B", "x")], [("A", "x")], terminated=[False, True, False])
    assert merged(rows) == [False] * 3
    assert merged(rows, ["B", "C", "B"]) == [True, False, True]


def test_a_given_next_state_counts_more_than_the_next_row():
    rows = two_walks([("A", "x"), ("B", "x")], [("A", "x"), ("C", "x")])
    assert merged(rows) == [False] * 4
    assert merged(rows, ["M", "E", "M", "E"]) == [True, False, True, False]
    same = two_walks([("A", "x"), ("B", "x")], [("A", "x"), ("B", "x")])
    assert merged(same, ["M", "E", "N", "E"]) == [False, True, False, True]


@pytest.mark.parametrize(
    "states",
    [
        (5, 6),
        (2**53, 2**53 + 1),  # the same as floats
        (-(2**53), -(2**53) - 1),
        (np.int64(2**53), np.int64(2**53 + 1)),
        (np.uint64(2**63), np.uint64(2**63 + 1)),
        (1.5, 2.5),
        ("M", "N"),
        ((1, 2), (1, 3)),
        ([1], [2]),
        (np.array([1, 2]), np.array([1, 3])),
    ],
)
def test_a_given_next_state_is_of_any_kind_and_none_is_the_end(states):
    state, other = states
    rows = two_walks([("A", "x"), ("B", "x")], [("A", "x"), ("B", "x")])
    assert merged(rows, [state, None, state, None]) == [True] * 4
    assert merged(rows, [state, None, other, None]) == [False, True] * 2
    assert merged(rows, [state, None, state, other]) == [True, False] * 2
    assert merged(rows, [None] * 4) == [True] * 4


def test_an_unknown_state_or_action_never_matches():
    walk = [("A", "x"), ("B", "x"), ("C", "x")]
    no_state = [("A", "x"), (None, "x"), ("C", "x")]
    no_action = [("A", "x"), ("B", None), ("C", "x")]
    assert merged(two_walks(walk, walk)) == [True] * 6
    assert merged(two_walks(no_state, no_state)) == [False, False, True] * 2
    assert merged(two_walks(no_action, no_action)) == [True, False, True] * 2
    assert merged(two_walks(no_action, no_action), history=1) == [True, False, False] * 2


def test_equal_edges_of_two_groups_do_not_match():
    rows = two_walks([("A", "x")], [("A", "y")])
    twice = {name: column * 2 for name, column in rows.items()}
    twice |= {"group": ["g", "g", "h", "h"], "trajectory": [0, 1, 2, 3]}
    assert merged(twice) == [False] * 4


def test_groups_without_signal_get_nothing():
    alone = {name: column[:2] for name, column in HAND.items()}
    equal = two_walks([("A", "x")], [("A", "x")], won=0.0)
    for base in ("grpo", "rloo"):
        assert credit(alone, base=base).tolist() == [0, 0]
        assert credit(equal, base=base).tolist() == [0, 0]
