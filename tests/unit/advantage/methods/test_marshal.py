"""marshal: the released code's outputs, its twin, roles inside and across trajectories."""

import naive
import numpy as np
import pytest
from estimator_cases import GAMMA, as_batch, assert_same_credit, cases, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from naive.marshal import deviation

from verl_turnkey.advantage import StepBatch, compute_credit

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
def test_equals_its_naive_twin(rows, params):
    credit = compute_credit("marshal", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.marshal(rows, **params))


GAME = {
    "group": ["g"] * 4,
    "trajectory": [0] * 4,
    "step": range(4),
    "reward": [0.0, 0.0, 1.0, -1.0],
    "extra": {"role": ["first", "second"] * 2},
}


def test_one_trajectory_of_two_players_is_two_episodes():
    """Returns: the first player's turns 1, 1, the second one's -1, -1; nothing to tell the turns of a role apart."""
    credit = compute_credit("marshal", StepBatch(**GAME), advantage_norm="none")
    assert credit.advantage.tolist() == [1, -1, 1, -1]
    assert credit.metrics["credit/return/first"] == 1
    assert compute_credit("marshal", StepBatch(**GAME)).advantage.tolist() == [0] * 4


def test_each_role_is_compared_with_itself():
    """The second player always loses 1 more: that is the seat, not the play."""
    batch = StepBatch(
        group=["g"] * 4,
        trajectory=[0, 0, 1, 1],
        step=[0, 1, 0, 1],
        reward=[1.0, -1.0, 0.0, -2.0],
        extra={"role": [0, 1, 0, 1]},
    )
    assert compute_credit("marshal", batch).advantage.tolist() == [0.5, 0.5, -0.5, -0.5]


def test_a_role_whose_returns_are_equal():
    """0; the released code's mean is that of the return and 0, and whitening knows only what all tokens share."""
    equal = StepBatch(**{**GAME, "reward": [0.0, 0.0, 1.0, 1.0]})
    apart = StepBatch(**GAME)
    assert compute_credit("marshal", equal).advantage.tolist() == [0] * 4
    assert compute_credit("marshal", equal, advantage_norm="distinct_mean").advantage.tolist() == [0.5] * 4
    whitened = {"advantage_norm": "distinct_mean", "whiten_advantages": True}
    assert compute_credit("marshal", equal, **whitened).advantage.tolist() == [0] * 4
    assert compute_credit("marshal", apart, **whitened).advantage[0] > 0.5
