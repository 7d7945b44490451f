"""rae: the check values, its twin, all orders, and the average from batch to batch."""

import itertools
import json

import naive
import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit

DECAY = st.sampled_from([0.0, 0.5, 0.95, 1.0])
STATE = st.sampled_from([{}, {"setter": 0.5, "None": -2.0}])


@settings(max_examples=150, deadline=None)
@given(step_rows("role"), st.fixed_dictionaries({"decay": DECAY, "gamma": st.sampled_from([1.0, 0.5]), "state": STATE}))
def test_equals_its_naive_twin(rows, params):
    for row in rows:  # the score of a trajectory is one number, of either player
        row.pop("score", None)
    credit = compute_credit("rae", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.rae(rows, **params))


def games(outcomes, order=None, role="p"):
    n = len(outcomes)
    extra = {"role": [role] * n} if order is None else {"role": [role] * n, "order": order}
    return StepBatch(group=range(n), trajectory=range(n), step=[0] * n, reward=outcomes, extra=extra)


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


def test_constant_outcomes_decay_to_nothing():
    state, left = {}, []
    for _ in range(60):
        credit = compute_credit("rae", games([2.0] * 4), state=state)
        state = credit.state
        left.append(credit.advantage.max())
    assert left[0] == pytest.approx(2 * (1 - 0.95**4) / 0.2)
    assert all(b < a for a, b in itertools.pairwise(left))
    assert left[-1] < 1e-4


def test_each_role_has_its_own_average_and_outcome():
    """One zero-sum game in one trajectory; the setter lost before."""
    batch = StepBatch(
        group=[0] * 4,
        trajectory=[0] * 4,
        step=range(4),
        reward=[0.0, 0.0, 1.0, -1.0],
        extra={"role": ["guesser", "setter"] * 2},
    )
    credit = compute_credit("rae", batch, state={"setter": -0.6}, gamma=0.5)
    np.testing.assert_allclose(credit.advantage, [0.5, -0.2, 1.0, -0.4], atol=1e-12)
    assert credit.state == pytest.approx({"guesser": 0.05, "setter": -0.62})


@pytest.mark.parametrize("column", [[0, 1], [0.0, 1.0], [0, True, 1], [0, 1, "x"], np.array([0, 1]), [2**60, 1]])
def test_a_whole_number_is_one_role_whatever_the_column_s_type(column):
    n = len(column)
    batch = StepBatch(group=range(n), trajectory=range(n), step=[0] * n, reward=[1.0] * n, extra={"role": column})
    credit = compute_credit("rae", batch, state={"1": 1.0})
    assert set(credit.state) == {str(int(role)) if role != "x" else role for role in column}
    assert credit.state["1"] == 1.0
    assert credit.metrics["credit/baseline/1"] == 1.0


@pytest.mark.parametrize("roles", [[1, "1"], ["None", None], [0.5, "0.5"]])
def test_two_roles_with_the_same_text_are_refused(roles):
    batch = StepBatch(group=range(2), trajectory=range(2), step=[0] * 2, reward=[1, -1], extra={"role": roles})
    for method in ("rae", "marshal"):
        with pytest.raises(ConfigError, match=rf"extra\.role: .*different texts, got {roles[0]!r} and {roles[1]!r}"):
            compute_credit(method, batch)


@pytest.mark.parametrize("order", [[0, 0], [0, float("nan")], ["first", "second"]])
def test_an_order_that_is_none(order):
    with pytest.raises(ConfigError, match=r"rae: extra\.order"):
        compute_credit("rae", games([1, 0], order=order))
