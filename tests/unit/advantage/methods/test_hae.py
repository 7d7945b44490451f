"""hae: the released code's outputs, its twin, segments and their ends."""

import naive
import numpy as np
import pytest
from estimator_cases import GAMMA, as_batch, assert_same_credit, cases, columns, step_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from naive.critics import streams

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit

VALUES = ("value_low", "value_high", "value_term")
LAM = st.sampled_from([0.0, 0.95, 1.0])


def read(case):
    """The batch of a reference case: a stream's value stands at its own token, or at the response's last."""
    inputs = case["inputs"]
    mask = np.array(inputs["response_mask"], dtype=bool)
    owned = {name: np.array(inputs[f"{name}_mask"], dtype=bool) & mask for name in ("action", "subgoal", "switch")}
    extra = {"switch": inputs["switch"]} | {f"has_{name}": own.any(1).astype(float) for name, own in owned.items()}
    for name in VALUES:
        at = np.array(inputs[name.replace("value", "value_mask")], dtype=bool) & mask
        place = np.where(at.any(1), at.argmax(1), mask.sum(1) - 1)
        extra[name] = np.array(inputs[name])[np.arange(len(mask)), place]
    cost = case["params"]["invalid_action_penalty_coef"]
    return StepBatch(
        group=["g"] * len(mask),
        trajectory=inputs["traj_uid"],
        step=inputs["turn_idx"],
        reward=[r - cost * (not ok) for r, ok in zip(inputs["step_rewards"], inputs["is_action_valid"], strict=True)],
        terminated=inputs["dones"],
        extra=extra,
    ), owned


@pytest.mark.parametrize("case", cases("hiper_hae"))
def test_equals_the_reference(case):
    params, expected = case["params"], case["expected"]
    batch, owned = read(case)
    credit = compute_credit(
        "hae",
        batch,
        gamma=params["gamma"],
        lam_turn=params["lam_turn"],
        lam_seg=params["lam_seg"],
        keep_penalty=-params["keep_penalty"],
        keep_penalty_mode=params["keep_penalty_mode"],
        bootstrap_truncated=params["bootstrap_truncated"],
        normalise=params["norm_adv"],
    )
    high, switch = credit.extra["subgoal_advantages"], credit.extra["switch_advantages"]
    for got, stream, key in (
        (credit.advantage, "action", "advantages_low"),
        (high, "subgoal", "advantages_high"),
        (switch, "switch", "advantages_term"),
    ):
        np.testing.assert_allclose(got[:, None] * owned[stream], expected[key], rtol=0, atol=2e-5)
    for got, name, key in (
        (credit.targets["low"], "low", "returns_low"),
        (credit.targets["high"], "high", "returns_high"),
        (credit.targets["term"], "term", "returns_term"),
    ):
        at = np.array(case["inputs"][f"value_mask_{name}"]) * mask_of(case)
        assert not np.isnan(got[at.any(1)]).any()
        np.testing.assert_allclose(np.nan_to_num(got)[:, None] * at, expected[key], rtol=0, atol=2e-5)


def mask_of(case):
    return np.array(case["inputs"]["response_mask"])


@settings(max_examples=150, deadline=None)
@given(
    step_rows("switch", *VALUES, ends=True),
    st.fixed_dictionaries(
        {
            **GAMMA,
            "lam_turn": LAM,
            "lam_seg": LAM,
            "keep_penalty": st.sampled_from([0.0, 0.3]),
            "keep_penalty_mode": st.sampled_from(["fixed", "normalized"]),
            "bootstrap_truncated": st.booleans(),
            "normalise": st.booleans(),
        }
    ),
)
def test_equals_its_naive_twin(rows, params):
    credit = compute_credit("hae", as_batch(rows), **params)
    assert_same_credit(credit.advantage, naive.hae(rows, **params))
    expected = streams(rows, **params)
    assert_same_credit(credit.extra["subgoal_advantages"], expected["subgoal"])
    assert_same_credit(credit.extra["switch_advantages"], expected["switch"])
    assert_same_credit(credit.returns, expected["low"])
    assert credit.targets["low"] is credit.returns
    learnt = ~np.isnan(credit.targets["high"])
    assert_same_credit(credit.targets["high"][learnt], np.array(expected["high"])[learnt])
    assert learnt.tolist() == expected["opens"]
    assert_same_credit(credit.targets["term"], expected["term"])
    assert_same_credit(credit.extra["high_returns"], expected["high"])
    assert_same_credit(credit.extra["term_returns"], expected["term"])


#: Two segments of two turns; the subgoal of the second one pays.
EPISODE = columns([0.0, 0.0, 0.0, 1.0], [0] * 4, terminated=[False] * 3 + [True])
EXTRA = {
    "switch": [1, 0, 1, 0],
    "value_low": [0.2, 0.3, 0.5, 0.8],
    "value_high": [0.1, 9.0, 0.6, 9.0],
    "value_term": [0.4] * 4,
}


def hae(extra=None, **params):
    batch = StepBatch(**EPISODE, extra={**EXTRA, **(extra or {})})
    return compute_credit("hae", batch, **{"normalise": False, "lam_turn": 1.0, "lam_seg": 1.0, **params})


def test_two_segments_by_hand():
    """The first segment ends with what the second one promises, 0.6; the value 9 of inner turns is read nowhere."""
    credit = hae()
    np.testing.assert_allclose(credit.advantage, [0.6 - 0.2, 0.6 - 0.3, 1 - 0.5, 1 - 0.8], atol=1e-12)
    np.testing.assert_allclose(credit.extra["subgoal_advantages"], [1 - 0.1, 0, 1 - 0.6, 0], atol=1e-12)
    np.testing.assert_allclose(credit.extra["switch_advantages"], [0.2, 0.2, 0.6, 0.6], atol=1e-12)
    assert hae(lam_seg=0.0).extra["subgoal_advantages"].tolist() == pytest.approx([0.6 - 0.1, 0, 1 - 0.6, 0])


def test_turns_without_tokens_of_a_stream_get_none_of_it():
    credit = hae({"has_action": [1, 1, 1, 0], "has_subgoal": [0, 1, 1, 1]}, normalise=True)
    assert credit.advantage[3] == 0
    assert credit.advantage[:3].mean() == pytest.approx(0, abs=1e-9)
    assert credit.extra["subgoal_advantages"].tolist() == [0, 0, 0, 0], "one is left: nothing to compare it with"


@pytest.mark.parametrize("column", VALUES)
def test_values_that_are_none(column):
    with pytest.raises(ConfigError, match=rf"hae: extra\.{column}: expected"):
        hae({column: [0.0, 0.0, None, 0.0]})


@pytest.mark.parametrize("missing", [None, float("nan")])
def test_value_high_may_be_missing_inside_a_segment(missing):
    partly, whole = hae({"value_high": [0.1, missing, 0.6, missing]}, normalise=True), hae(normalise=True)
    assert partly.advantage.tolist() == whole.advantage.tolist()
    for name, stream in whole.extra.items():
        assert partly.extra[name].tolist() == stream.tolist()
