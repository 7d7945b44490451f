"""Methods on graphs of states: numbers of papers, their twins, and their edge cases."""

import naive
import numpy as np
import pytest
from estimator_cases import EPISODE, GAMMA, NORM, as_batch, assert_same_credit, cases, columns, step_rows, table
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit

# --- graph: the check values of both rules, its twin, and ends of trajectories ----------------------------------------
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
def test_graph_equals_its_naive_twin(rows, params):
    for row in rows:  # the score of a trajectory is one number
        row.pop("score", None)
    credit = compute_credit("graph", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.graph(rows, **params))


#: A-B-success; A-C-A-D; A-B-E
WALKS = columns(
    [0, 10, 0, 0, 0, 0, 0],
    [0, 0, 1, 1, 1, 2, 2],
    anchor=["A", "B", "A", "C", "A", "A", "B"],
    success=[True, True, *[False] * 5],
)


def graph(**params):
    return compute_credit("graph", StepBatch(**WALKS), **params).advantage


def test_graph_check_values():
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


def test_a_given_end_joins_the_graph():
    """A and B lose at once. B was where the third one won from: a step to it is worth more than one to nowhere."""
    walks = columns([0, 0, 0, 1], [0, 1, 2, 2], anchor=["A", "A", "Z", "B"], success=[False, False, True, True])
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
    walks = columns([0, 0, 0, 1], [0, 1, 2, 2], anchor=states)
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


GRAFT = columns(
    [0, 1, 0, 0, 0, 0],
    [0, 0, 1, 1, 2, 2],
    anchor=["A", "B", "A", "B", "A", "C"],
    success=[True, True, False, False, False, False],
)


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
    batch = table([0, 0, 0, 0, 1], [0] * 5, anchor=["A"] * 5, success=[1] * 5)
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
TWO = columns([0, 10, 0, 0], [0, 0, 1, 1], anchor=["A", "B", "A", "C"], success=[True, True, False, False])


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


# --- salt: both readings, the hand example, its twin, and when two steps are the same edge ----------------------------
PARAMS_SALT = st.fixed_dictionaries(
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
@given(step_rows("anchor", "action", ends=True), PARAMS_SALT)
def test_salt_equals_its_naive_twin(rows, params):
    assert_same_credit(compute_credit("salt", as_batch(rows), **params).advantage, naive.salt(rows, **params))


@settings(max_examples=100, deadline=None)
@given(step_rows("anchor", "action", "next_anchor", ends=True), PARAMS_SALT)
def test_equals_its_naive_twin_when_the_next_state_is_given(rows, params):
    assert_same_credit(compute_credit("salt", as_batch(rows), **params).advantage, naive.salt(rows, **params))


HAND = columns(
    [0.0, 1.0, 0.0, 0.0, 0.0],
    ["t0", "t0", "t1", "t1", "t2"],
    anchor=["s0", "s1", "s0", "s1", "s0"],
    action=["a", "b", "a", "c", "d"],
)


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


def test_an_edge_walked_twice_by_one_trajectory():
    """The winner goes round A -x-> A twice, the loser once: two readings of the mean."""
    rows = columns(
        [0.0, 0.0, 1.0, 0.0, 0.0],
        ["t0"] * 3 + ["t1"] * 2,
        anchor=["A", "A", "A", "A", "A"],
        action=["x", "x", "y", "x", "z"],
    )
    share = 0.5**0.5
    got = credit(rows)
    np.testing.assert_allclose(got, [share / 3, share / 3, share, share / 3, -share], atol=1e-6)
    np.testing.assert_allclose(credit(rows, average="trajectories"), [0, 0, share, 0, -share], atol=1e-6)


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


# --- rtmc: the check values, its twin, and signatures -----------------------------------------------------------------
def kind(key):
    """A signature: texts are one action, numbers another, and b is none."""
    return None if key == "b" else type(key).__name__


def fails(key):
    raise KeyError(key)


PARAMS_RTMC = st.fixed_dictionaries(
    {
        **GAMMA,
        "n_prior": st.sampled_from([0.0, 2.0]),
        "divide_by_std": st.booleans(),
        "states": st.sampled_from(["anchor", "actions", "column"]),
        "actions": st.sampled_from(["key", "column"]),
        "signature": st.sampled_from([None, f"{__name__}:kind"]),
    }
)


@settings(max_examples=200, deadline=None)
@given(step_rows("anchor", "action"), PARAMS_RTMC)
def test_rtmc_equals_its_naive_twin(rows, params):
    for row in rows:
        row.pop("score", None)
        row["state_signature"] = None if row["anchor"] is None else str(row["anchor"])
        row["action_signature"] = None if row["action"] is None else str(row["action"])
    credit = compute_credit("rtmc", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.rtmc(rows, **params))


#: s1 a, s2 b (1); s1 a, s3 c (0); s1 d, s2 e (0)
WALKS_RTMC = columns(
    [0, 1, 0, 0, 0, 0],
    [0, 0, 1, 1, 2, 2],
    anchor=["s1", "s2", "s1", "s3", "s1", "s2"],
    action=["a", "b", "a", "c", "d", "e"],
)


def test_rtmc_check_values():
    credit = compute_credit("rtmc", StepBatch(**WALKS_RTMC))
    value = dict(zip(WALKS_RTMC["anchor"], credit.levels["state_value"], strict=True))
    np.testing.assert_allclose([value["s1"], value["s2"], value["s3"]], [0.331333, 0.416667, 0.222222], atol=1e-6)
    expected = [0.163667, 0.583333, 0.163667, -0.222222, -0.331333, -0.416667]
    np.testing.assert_allclose(credit.advantage, expected, atol=1e-6)
    assert credit.metrics["credit/states"] == 3
    assert credit.metrics["credit/share_steps_with_alternatives"] == 5 / 6


def test_states_of_past_actions_do_not_know_the_order():
    """a then b, and b then a, lead to the same state; c to another."""
    batch = table([0, 0, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 2], action=["a", "b", "x", "b", "a", "y", "c"])
    credit = compute_credit("rtmc", batch, states="actions")
    state = credit.groups["state_value"]
    assert state[2] == state[5]
    assert state[0] == state[3] == state[6]
    assert len({*state}) == 4
    assert credit.advantage[2] > 0 > credit.advantage[5]


@pytest.mark.parametrize("value", ["no_such_module:function", f"{__name__}:no_such_function", ""])
def test_a_signature_that_cannot_be_imported(value):
    with pytest.raises(ConfigError, match=r"rtmc\.signature: expected"):
        compute_credit("rtmc", StepBatch(**WALKS_RTMC), signature=value)


def test_a_function_that_fails_is_named():
    with pytest.raises(ConfigError, match=r"signature=.*:fails: KeyError: 'a'"):
        compute_credit("rtmc", StepBatch(**WALKS_RTMC), signature=f"{__name__}:fails")


@pytest.mark.parametrize(
    ("params", "missing"),
    [
        ({}, "action"),
        ({"actions": "column"}, "extra.action_signature"),
        ({"states": "column"}, "extra.state_signature"),
    ],
)
def test_the_columns_that_the_parameters_read_are_needed(params, missing):
    batch = StepBatch(**{name: column for name, column in WALKS_RTMC.items() if name != "action"})
    with pytest.raises(ConfigError, match=f"'rtmc' needs the column '{missing}'"):
        compute_credit("rtmc", batch, **params)
