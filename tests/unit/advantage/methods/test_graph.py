"""graph: the check values of both rules, its twin, and ends of trajectories."""

import naive
import numpy as np
import pytest
from estimator_cases import EPISODE, GAMMA, as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch, compute_credit

PARAMS = st.fixed_dictionaries(
    {
        **EPISODE,
        **GAMMA,
        "rule": st.sampled_from(["graphgpo", "graphgpo", "graft", "g2po"]),
        "edge": st.sampled_from(["paper", "code", "progress"]),
        "decay": st.sampled_from([0.1, 0.9]),
        "scale": st.sampled_from([1.0, 10.0]),
        "step_advantage_w": st.sampled_from([0.0, 0.5, 1.0]),
        "success_value": st.sampled_from([None, 10.0]),
    }
)


@settings(max_examples=200, deadline=None)
@given(st.one_of(step_rows("anchor", "success"), step_rows("anchor", "success", "next_anchor")), PARAMS)
def test_equals_its_naive_twin(rows, params):
    for row in rows:  # the score of a trajectory is one number
        row.pop("score", None)
    credit = compute_credit("graph", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.graph(rows, **params))


#: A-B-success; A-C-A-D; A-B-E
WALKS = {
    "group": ["g"] * 7,
    "trajectory": [0, 0, 1, 1, 1, 2, 2],
    "step": [0, 1, 0, 1, 2, 0, 1],
    "reward": [0, 10, 0, 0, 0, 0, 0],
    "anchor": ["A", "B", "A", "C", "A", "A", "B"],
    "success": [True, True, *[False] * 5],
}


def graph(**params):
    return compute_credit("graph", StepBatch(**WALKS), **params).advantage


def test_check_values():
    episode = graph(edge="code", scope="steps", step_advantage_w=0)
    np.testing.assert_allclose(episode, [1.463850, 1.463850, *[-0.585540] * 5], atol=1e-6)
    both = [2.329856, 2.170956, -1.443709, -0.585540, -1.459383, 0.280466, -1.292647]
    np.testing.assert_allclose(graph(edge="code", scope="steps"), both, atol=1e-6)
    np.testing.assert_allclose(graph(scope="steps"), both, atol=2e-5)  # the paper's: less before epsilon


@pytest.mark.parametrize(
    ("edge", "q"),
    [
        ("code", [1, 10, 0.01, 0.1, 0.001, 1, 0.001]),
        ("paper", [0.1, 1, 0.001, 0.01, 0.0001, 0.1, 0.0001]),
        ("progress", [10, 10, 0.1, 10, 0.01, 10, 0.001]),
    ],
)
def test_check_values_of_a_step(edge, q):
    """norm=mean shows the value of a step: its distance from the mean of its state."""
    q = np.array(q)
    step = graph(edge=edge, norm="mean") - graph(edge=edge, norm="mean", step_advantage_w=0)
    at = {"A": [0, 2, 4, 5], "B": [1, 6], "C": [3]}
    for rows in at.values():
        np.testing.assert_allclose(step[rows], q[rows] - q[rows].mean(), atol=1e-12)


def test_without_a_success_only_the_outcomes_are_left():
    lost = StepBatch(**{**WALKS, "success": [False] * 7})
    plain = compute_credit("grpo_steps", lost).advantage
    assert compute_credit("graph", lost).advantage.tolist() == plain.tolist()


def test_a_given_end_joins_the_graph():
    """A and B lose at once. B was where the third one won from: a step to it is worth more than one to nowhere."""
    walks = {
        "group": ["g"] * 4,
        "trajectory": [0, 1, 2, 2],
        "step": [0, 0, 0, 1],
        "reward": [0, 0, 0, 1],
        "anchor": ["A", "A", "Z", "B"],
        "success": [False, False, True, True],
    }
    assert (
        compute_credit("graph", StepBatch(**walks)).advantage[0]
        == compute_credit("graph", StepBatch(**walks)).advantage[1]
    )
    batch = StepBatch(**walks, extra={"next_anchor": ["B", "X", "B", None]})
    got = compute_credit("graph", batch, step_advantage_w=1, norm="mean").advantage
    np.testing.assert_allclose(got[0] - got[1], 10 * (0.1**2 - 0.1**4), atol=1e-12)


def test_given_states_of_any_kind_are_the_anchors_they_equal():
    """A next state as a dict finds the anchor that is an equal dict."""
    states = [{"room": 1}, {"room": 1}, {"room": 9}, {"room": 2}]
    walks = {
        "group": [0] * 4,
        "trajectory": [0, 1, 2, 2],
        "step": [0, 0, 0, 1],
        "reward": [0, 0, 0, 1],
        "anchor": states,
    }
    batch = StepBatch(
        **walks, success=[0, 0, 1, 1], extra={"next_anchor": [{"room": 2}, {"room": 3}, {"room": 2}, None]}
    )
    got = compute_credit("graph", batch, norm="mean").advantage
    np.testing.assert_allclose(got[0] - got[1], 10 * (0.1**2 - 0.1**4), atol=1e-12)


@pytest.mark.parametrize(("anchor", "following"), [(int, int), (str, str), (int, str)])
def test_a_given_state_is_the_anchor_whose_text_it_is(anchor, following):
    """A, B, C are 0, 1, 2; ``turnkey_env`` writes an anchor as it is, and the next one as text."""
    walks = WALKS | {"anchor": [anchor(key) for key in (0, 1, 0, 2, 0, 0, 1)]}
    batch = StepBatch(**walks, extra={"next_anchor": [following(key) for key in (1, 9, 2, 0, 3, 1, 4)]})
    expected = [2.0207, 1.8618, -1.4355, -0.5774, -1.4512, 0.2886, -1.2845]
    np.testing.assert_allclose(compute_credit("graph", batch).advantage, expected, atol=1e-4)


GRAFT = {
    "group": ["g"] * 6,
    "trajectory": [0, 0, 1, 1, 2, 2],
    "step": [0, 1] * 3,
    "reward": [0, 1, 0, 0, 0, 0],
    "anchor": ["A", "B", "A", "B", "A", "C"],
    "success": [True, True, False, False, False, False],
}


def test_check_values_of_graft():
    """A-B-OK (1), A-B-E (0), A-C-F (0) at gamma 0.99: V(B) 0.495, V(C) 0, V(A) 0.3267."""
    got = compute_credit("graph", StepBatch(**GRAFT), rule="graft").advantage
    np.testing.assert_allclose(got, [0.163350, 0.495, 0.163350, -0.495, -0.3267, 0], atol=1e-12)


def test_graft_sees_no_difference_where_there_is_none():
    lost = StepBatch(**{**GRAFT, "reward": [0.0] * 6})
    assert not compute_credit("graph", lost, rule="graft").advantage.any()
    won = StepBatch(**{**WALKS, "reward": [0.1 if at in (1, 4, 6) else 0.0 for at in range(7)]})
    assert not compute_credit("graph", won, rule="graft", gamma=1.0).advantage.any()
    same_end = StepBatch(**{name: column[:2] for name, column in WALKS.items()})
    assert not compute_credit("graph", same_end, rule="graft").advantage.any()


def test_graft_converges_on_a_walk_that_comes_back():
    """A-A-A-...: the value of a loop, by hand 0.9 (0.8 V + 0.2) = V."""
    batch = StepBatch(
        group=[0] * 5, trajectory=[0] * 5, step=range(5), reward=[0, 0, 0, 0, 1], anchor=["A"] * 5, success=[1] * 5
    )
    value = 0.18 / 0.28
    got = compute_credit("graph", batch, rule="graft", gamma=0.9).advantage
    np.testing.assert_allclose(got, [*[0.9 * value - value] * 4, 0.9 - value], atol=1e-11)


def wandering(order=None, loud=1.0):
    """Three groups on six states, in which all paths cross; the first can be loud, and the third lost all."""
    random = np.random.default_rng(7)
    trajectory, step = np.divmod(np.arange(24 * 30), 30)
    columns = {
        "group": trajectory // 8,
        "trajectory": trajectory,
        "step": step,
        "reward": random.choice([0.1, 0.7, -0.3], len(step)) * (step == 29) * (trajectory < 16),
        "anchor": random.choice([*"ABCDEF"], len(step)),
        "success": np.zeros(len(step)),
    }
    columns["reward"] *= np.where(trajectory < 8, loud, 1.0)
    order = np.arange(len(step)) if order is None else order
    return StepBatch(**{name: column[order] for name, column in columns.items()})


@pytest.mark.parametrize("seed", range(5))
def test_graft_is_the_same_in_any_order_of_the_rows(seed):
    """Bit by bit: sums over the edges of a state are exact."""
    order = np.random.default_rng(seed).permutation(24 * 30)
    in_order, other = (compute_credit("graph", wandering(rows), rule="graft").advantage for rows in (None, order))
    assert in_order[order].tolist() == other.tolist()


def test_graft_computes_each_group_in_its_own_scale():
    """Rewards of 1e12 in one group change no bit in the others."""
    plain, other = (compute_credit("graph", wandering(loud=by), rule="graft").advantage[8 * 30 :] for by in (1.0, 1e12))
    assert plain.any()
    assert plain.tolist() == other.tolist()


@pytest.mark.parametrize(("loops", "converged"), [(20, 1.0), (3000, 0.5)])
def test_values_that_did_not_converge_are_told(loops, converged):
    """A-A-...-A won and A lost, at gamma 1: V(A) is 1/2, but it is approached the more slowly the longer the walk. The
    other group needs no sweep."""
    n = loops + 1
    batch = StepBatch(
        group=[0] * n + [1],
        trajectory=[0] * loops + [1, 2],
        step=[*range(loops), 0, 0],
        reward=[0.0] * (loops - 1) + [1.0, 0.0, 1.0],
        anchor=["A"] * (n + 1),
        success=[0] * (n + 1),
    )
    credit = compute_credit("graph", batch, rule="graft", gamma=1.0)
    assert credit.metrics["credit/share_groups_converged"] == converged
    if converged == 1.0:
        np.testing.assert_allclose(credit.advantage, [*[0] * (loops - 1), 0.5, -0.5, 0], atol=1e-10)


#: A-B (10), A-C (0)
TWO = {
    "group": ["g"] * 4,
    "trajectory": [0, 0, 1, 1],
    "step": [0, 1] * 2,
    "reward": [0, 10, 0, 0],
    "anchor": ["A", "B", "A", "C"],
    "success": [True, True, False, False],
}


def test_check_values_of_g2po():
    """At gamma 0.95: V(A) 4.5125, V(B) 9.5, V(C) 0; the outputs of the released code."""
    params = {"rule": "g2po", "gamma": 0.95, "scope": "steps"}
    credit = compute_credit("graph", StepBatch(**TWO), **params)
    np.testing.assert_allclose(credit.levels["state_value"], [4.5125, 9.5, 4.5125, 0], atol=1e-12)
    np.testing.assert_allclose(credit.parts["step_level"], [0.707107, 0, -0.707107, 0], atol=1e-6)
    np.testing.assert_allclose(credit.parts["edge_level"], [1.22144, 0.06598, -1.224659, -0.062762], atol=1e-6)
    steps = [1.928547, 0.06598, -1.931766, -0.062762]
    episode = compute_credit("graph", StepBatch(**TWO), step_advantage_w=0, **params).advantage
    np.testing.assert_allclose(credit.advantage - episode, steps, atol=1e-6)
    np.testing.assert_allclose(episode, [0.866025, 0.866025, -0.866025, -0.866025], atol=1e-6)


def test_g2po_knows_a_success_by_its_column():
    """The released code asks for a score of 10: with scores of 0 and 1 nothing succeeds there."""
    small = TWO | {"reward": [0, 1, 0, 0]}
    params = {"rule": "g2po", "gamma": 0.95, "norm": "mean", "step_advantage_w": 1}
    large = compute_credit("graph", StepBatch(**TWO), **params).advantage
    np.testing.assert_allclose(compute_credit("graph", StepBatch(**small), **params).advantage, large / 10)
    other = compute_credit("graph", StepBatch(**small), success_value=10, **params)
    np.testing.assert_allclose(other.parts["edge_level"][1] - other.parts["edge_level"][0], 10 - 0.95 - 0.49875)


def test_g2po_with_a_penalty_inside():
    """Released scope: A to B and A to C, and the first with an invalid action: V(s') 0.1 lower."""
    batch = StepBatch(**TWO, penalty=[0.1, 0, 0, 0])
    got = compute_credit("graph", batch, rule="g2po", gamma=0.95, scope="steps", norm="mean").parts
    np.testing.assert_allclose(got["step_level"], [4.7, 0, -4.7, 0], atol=1e-12)
    assert not got["penalty"].any()
