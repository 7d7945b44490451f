"""Methods of several roles: numbers of papers, their twins, and their edge cases."""

import itertools
import json

import naive
import numpy as np
import pytest
from estimator_cases import GAMMA, as_batch, assert_same_credit, cases, columns, step_rows, table
from hypothesis import given, settings
from hypothesis import strategies as st
from naive.several_roles import deviation

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit

# --- marshal: the released code's outputs, its twin, roles inside and across trajectories -----------------------------
RELEASED = {
    "reward_norm": "mean",
    "whiten_rewards": True,
    "advantage_norm": "distinct_mean",
    "whiten_advantages": True,
}
#: Float32 gives equal returns, summed in another order, different values there, and the mean counts them twice.
TWICE = ("marshal_04", "marshal_08")


def read(case):
    """The batch of a reference case, and the response tokens of each turn: (row, column)."""
    inputs, columns, tokens = case["inputs"], {key: [] for key in ("trajectory", "step", "reward", "tokens")}, []
    player, rows = [], zip(inputs["response_mask"], inputs["turn_end"], inputs["turn_scores"], strict=True)
    for row, (mask, end, score) in enumerate(rows):
        begin = 0
        for step, at in enumerate(np.flatnonzero(end)):
            tokens.append([(row, t) for t in range(begin, at + 1) if mask[t]])
            for key, value in zip(columns, (row, step, score[at], len(tokens[-1])), strict=True):
                columns[key].append(value)
            player.append(inputs["player"][row])
            begin = at + 1
    return StepBatch(group=["game"] * len(player), **columns, extra={"role": player}), tokens


@pytest.mark.parametrize("case", cases("marshal"))
def test_equals_the_reference(case):
    batch, tokens = read(case)
    advantage = compute_credit("marshal", batch, **RELEASED).advantage
    if case["id"] in TWICE:
        advantage = counted_twice(case, tokens)
    expected = case["expected"]["advantages"]  # the first column is dropped there
    for value, turn in zip(advantage, tokens, strict=True):
        for row, t in turn:
            assert value == pytest.approx(expected[row][t - 1], abs=2e-5)


def counted_twice(case, tokens):
    """The last two steps on the reference's own returns, by values that are different in float32."""
    returns = np.array(case["expected"]["raw_returns"], dtype=np.float32)
    player = np.array(case["inputs"]["player"])
    different = {p: np.unique(returns[player == p]) for p in set(player)}
    assert any((np.diff(values) < 1e-6).any() for values in different.values()), "or it need not be told apart"
    centred = [float(returns[turn[0][0], turn[0][1] - 1] - different[player[turn[0][0]]].mean()) for turn in tokens]
    every = [value for value, turn in zip(centred, tokens, strict=True) for _ in turn]
    return [(value - np.mean(every)) / deviation(every) for value in centred]


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(step_rows("role"), step_rows("role", "tokens")),
    st.fixed_dictionaries(
        {
            **GAMMA,
            "reward_norm": st.sampled_from(["none", "mean", "mean_std"]),
            "whiten_rewards": st.booleans(),
            "advantage_norm": st.sampled_from(["mean", "mean_std", "distinct_mean", "none"]),
            "whiten_advantages": st.booleans(),
        }
    ),
)
def test_marshal_equals_its_naive_twin(rows, params):
    credit = compute_credit("marshal", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.marshal(rows, **params))


GAME = columns([0.0, 0.0, 1.0, -1.0], [0] * 4, extra={"role": ["first", "second"] * 2})


def test_one_trajectory_of_two_players_is_two_episodes():
    """Returns: the first player's turns 1, 1, the second one's -1, -1; nothing to tell the turns of a role apart."""
    credit = compute_credit("marshal", StepBatch(**GAME), advantage_norm="none")
    assert credit.advantage.tolist() == [1, -1, 1, -1]
    assert credit.metrics["credit/return/first"] == 1
    assert compute_credit("marshal", StepBatch(**GAME)).advantage.tolist() == [0] * 4


def test_a_role_whose_returns_are_equal():
    """0; the released code's mean is that of the return and 0, and whitening knows only what all tokens share."""
    equal = StepBatch(**{**GAME, "reward": [0.0, 0.0, 1.0, 1.0]})
    apart = StepBatch(**GAME)
    assert compute_credit("marshal", equal).advantage.tolist() == [0] * 4
    assert compute_credit("marshal", equal, advantage_norm="distinct_mean").advantage.tolist() == [0.5] * 4
    whitened = {"advantage_norm": "distinct_mean", "whiten_advantages": True}
    assert compute_credit("marshal", equal, **whitened).advantage.tolist() == [0] * 4
    assert compute_credit("marshal", apart, **whitened).advantage[0] > 0.5


# --- rae: the check values, its twin, all orders, and the average from batch to batch ---------------------------------
DECAY = st.sampled_from([0.0, 0.5, 0.95, 1.0])
STATE = st.sampled_from([{}, {"setter": 0.5, "None": -2.0}])


@settings(max_examples=150, deadline=None)
@given(step_rows("role"), st.fixed_dictionaries({"decay": DECAY, "gamma": st.sampled_from([1.0, 0.5]), "state": STATE}))
def test_rae_equals_its_naive_twin(rows, params):
    for row in rows:  # the score of a trajectory is one number, of either player
        row.pop("score", None)
    credit = compute_credit("rae", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.rae(rows, **params))


def games(outcomes, order=None, role="p"):
    n = len(outcomes)
    extra = {"role": [role] * n} if order is None else {"role": [role] * n, "order": order}
    return table(outcomes, group=range(n), extra=extra)


def test_check_values_in_a_given_order():
    credit = compute_credit("rae", games([1, -1, 1], order=[0, 1, 2]))
    np.testing.assert_allclose(credit.advantage, [1, -1.05, 1.0025], atol=1e-12)
    assert credit.state == pytest.approx({"p": 0.047625})
    assert credit.metrics["credit/baseline/p"] == pytest.approx(0.047625)


def test_the_given_order_is_not_that_of_the_rows():
    credit = compute_credit("rae", games([1, 1, -1], order=[2.5, 0.0, 1.0]))
    np.testing.assert_allclose(credit.advantage, [1.0025, 1, -1.05], atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("outcomes", [[1.0], [1.0, -1.0], [1.0, -1.0, 0.25, 1.0]])
def test_without_an_order_it_is_the_mean_over_all_orders(outcomes, decay):
    orders = list(itertools.permutations(range(len(outcomes))))
    credits = [compute_credit("rae", games(outcomes, order), state={"p": 0.3}, decay=decay) for order in orders]
    got = compute_credit("rae", games(outcomes), state={"p": 0.3}, decay=decay)
    np.testing.assert_allclose(got.advantage, np.mean([credit.advantage for credit in credits], axis=0), atol=1e-12)
    assert got.state["p"] == pytest.approx(np.mean([credit.state["p"] for credit in credits]), abs=1e-12)


def test_the_average_goes_on_from_batch_to_batch_through_a_checkpoint():
    """Six games at once, in order, and in batches of two with the state saved and loaded between them."""
    outcomes = [1, -1, 1, 1, 0, -1]
    at_once = compute_credit("rae", games(outcomes, order=range(6)))
    state, pieces = None, []
    for k in range(0, 6, 2):
        credit = compute_credit("rae", games(outcomes[k : k + 2], order=[0, 1]), state=state)
        pieces += credit.advantage.tolist()
        state = json.loads(json.dumps(credit.state))
    np.testing.assert_allclose(pieces, at_once.advantage, atol=1e-12)
    assert state == pytest.approx(at_once.state)


def test_roles_that_a_batch_lacks_keep_their_average():
    averages = {"p": 0.5, "absent": -0.25}
    credit = compute_credit("rae", games([1]), state=averages)
    assert credit.state == pytest.approx({"p": 0.525, "absent": -0.25})
    assert averages == {"p": 0.5, "absent": -0.25}, "the caller's own is not changed"


def test_each_role_has_its_own_average_and_outcome():
    """One zero-sum game in one trajectory; the setter lost before."""
    batch = table([0.0, 0.0, 1.0, -1.0], [0] * 4, role=["guesser", "setter"] * 2)
    credit = compute_credit("rae", batch, state={"setter": -0.6}, gamma=0.5)
    np.testing.assert_allclose(credit.advantage, [0.5, -0.2, 1.0, -0.4], atol=1e-12)
    assert credit.state == pytest.approx({"guesser": 0.05, "setter": -0.62})


@pytest.mark.parametrize("column", [[0, 1], [0.0, 1.0], [0, True, 1], [0, 1, "x"], np.array([0, 1]), [2**60, 1]])
def test_a_whole_number_is_one_role_whatever_the_column_s_type(column):
    n = len(column)
    batch = table([1.0] * n, group=range(n), role=column)
    credit = compute_credit("rae", batch, state={"1": 1.0})
    assert set(credit.state) == {str(int(role)) if role != "x" else role for role in column}
    assert credit.state["1"] == 1.0
    assert credit.metrics["credit/baseline/1"] == 1.0


@pytest.mark.parametrize("roles", [[1, "1"], ["None", None], [0.5, "0.5"]])
def test_two_roles_with_the_same_text_are_refused(roles):
    batch = table([1, -1], group=range(2), role=roles)
    for method in ("rae", "marshal"):
        with pytest.raises(ConfigError, match=rf"extra\.role: .*different texts, got {roles[0]!r} and {roles[1]!r}"):
            compute_credit(method, batch)


@pytest.mark.parametrize("order", [[0, 0], [0, float("nan")], ["first", "second"]])
def test_an_order_that_is_none(order):
    with pytest.raises(ConfigError, match=r"rae: extra\.order"):
        compute_credit("rae", games([1, 0], order=order))
