"""rtmc: the check values, its twin, and signatures."""

import naive
import numpy as np
import pytest
from estimator_cases import GAMMA, as_batch, assert_same_credit, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit


def kind(key):
    """A signature: texts are one action, numbers another, and b is none."""
    return None if key == "b" else type(key).__name__


def fails(key):
    raise KeyError(key)


PARAMS = st.fixed_dictionaries(
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
@given(step_rows("anchor", "action"), PARAMS)
def test_equals_its_naive_twin(rows, params):
    for row in rows:
        row.pop("score", None)
        row["state_signature"] = None if row["anchor"] is None else str(row["anchor"])
        row["action_signature"] = None if row["action"] is None else str(row["action"])
    credit = compute_credit("rtmc", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.rtmc(rows, **params))


#: s1 a, s2 b (1); s1 a, s3 c (0); s1 d, s2 e (0)
WALKS = {
    "group": ["g"] * 6,
    "trajectory": [0, 0, 1, 1, 2, 2],
    "step": [0, 1] * 3,
    "reward": [0, 1, 0, 0, 0, 0],
    "anchor": ["s1", "s2", "s1", "s3", "s1", "s2"],
    "action": ["a", "b", "a", "c", "d", "e"],
}


def test_check_values():
    credit = compute_credit("rtmc", StepBatch(**WALKS))
    value = dict(zip(WALKS["anchor"], credit.levels["state_value"], strict=True))
    np.testing.assert_allclose([value["s1"], value["s2"], value["s3"]], [0.331333, 0.416667, 0.222222], atol=1e-6)
    expected = [0.163667, 0.583333, 0.163667, -0.222222, -0.331333, -0.416667]
    np.testing.assert_allclose(credit.advantage, expected, atol=1e-6)
    assert credit.metrics["credit/states"] == 3
    assert credit.metrics["credit/share_steps_with_alternatives"] == 5 / 6


def test_the_std_divides_and_does_not_centre():
    credit = compute_credit("rtmc", StepBatch(**WALKS)).advantage
    got = compute_credit("rtmc", StepBatch(**WALKS), divide_by_std=True).advantage
    np.testing.assert_allclose(got, credit / credit.std(), atol=1e-12)
    assert abs(got.mean()) > 1e-3


def test_a_second_visit_does_not_count():
    """s a, s a, s b (1) and s b (0): Q(a) 0.81, Q(b) (1 + 0) / 2, V (0.81 + 1 + 0) / 3."""
    batch = StepBatch(
        group=["g"] * 4,
        trajectory=[0, 0, 0, 1],
        step=[0, 1, 2, 0],
        reward=[0, 0, 1, 0],
        anchor=["s"] * 4,
        action=["a", "a", "b", "b"],
    )
    got = compute_credit("rtmc", batch, gamma=0.9, n_prior=0.0).advantage
    np.testing.assert_allclose(got, [0.81 - 1.81 / 3] * 2 + [0.5 - 1.81 / 3] * 2, atol=1e-12)


def test_only_short_episodes_with_equal_outcomes_get_nothing():
    equal = StepBatch(**WALKS | {"reward": [0, 1] * 3})
    got = compute_credit("rtmc", equal, gamma=0.9).advantage
    assert (got[[0, 2, 4]] != 0).all()  # V' is drawn towards 1, while what follows is discounted
    assert not got[[1, 3, 5]].any()


def test_states_of_past_actions_do_not_know_the_order():
    """a then b, and b then a, lead to the same state; c to another."""
    batch = StepBatch(
        group=["g"] * 7,
        trajectory=[0, 0, 0, 1, 1, 1, 2],
        step=[0, 1, 2, 0, 1, 2, 0],
        reward=[0, 0, 1, 0, 0, 0, 0],
        action=["a", "b", "x", "b", "a", "y", "c"],
    )
    credit = compute_credit("rtmc", batch, states="actions")
    state = credit.groups["state_value"]
    assert state[2] == state[5]
    assert state[0] == state[3] == state[6]
    assert len({*state}) == 4
    assert credit.advantage[2] > 0 > credit.advantage[5]


def test_signatures_join_actions():
    """Without a signature all four actions differ; with it the first two and the last two are the same."""
    batch = StepBatch(
        group=["g"] * 4,
        trajectory=range(4),
        step=[0] * 4,
        reward=[1, 0, 0, 0],
        anchor=["s"] * 4,
        action=["open 1", "open 2", 3, 4],
    )
    got = compute_credit("rtmc", batch, signature=f"{__name__}:kind").advantage
    np.testing.assert_allclose(got, [0.25, 0.25, -0.25, -0.25])


@pytest.mark.parametrize("value", ["no_such_module:function", f"{__name__}:no_such_function", ""])
def test_a_signature_that_cannot_be_imported(value):
    with pytest.raises(ConfigError, match=r"rtmc\.signature: expected"):
        compute_credit("rtmc", StepBatch(**WALKS), signature=value)


def test_a_function_that_fails_is_named():
    with pytest.raises(ConfigError, match=r"signature=.*:fails: KeyError: 'a'"):
        compute_credit("rtmc", StepBatch(**WALKS), signature=f"{__name__}:fails")


@pytest.mark.parametrize(
    ("params", "missing"),
    [
        ({}, "action"),
        ({"actions": "column"}, "extra.action_signature"),
        ({"states": "column"}, "extra.state_signature"),
    ],
)
def test_the_columns_that_the_parameters_read_are_needed(params, missing):
    batch = StepBatch(**{name: column for name, column in WALKS.items() if name != "action"})
    with pytest.raises(ConfigError, match=f"'rtmc' needs the column '{missing}'"):
        compute_credit("rtmc", batch, **params)
