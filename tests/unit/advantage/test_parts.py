"""Why a step got its credit: parts that add up, groups of whom was compared with whom, and what is refused."""

from dataclasses import dataclass

import numpy as np
import pytest

from verl_turnkey.advantage import Credit, StepBatch, compute_credit, register_estimator, registry

STEPS = StepBatch(
    group=["task"] * 6,
    trajectory=[1, 1, 2, 2, 3, 3],
    step=[0, 1, 0, 1, 0, 1],
    reward=[0, 10, 0, 0, 0, 2],
    anchor=["A", "B", "A", "B", "C", "B"],
    penalty=[0, 0, 0.1, 0, 0, 0],
)


def told(mapping):
    return {name: np.round(values, 6).tolist() for name, values in mapping.items()}


def test_gigpo_says_what_each_level_adds_and_who_was_compared():
    credit = compute_credit("gigpo", STEPS, norm="mean", gamma=1.0, step_advantage_w=0.5)
    assert told(credit.parts) == {
        "episode_level": [6, 6, -4, -4, -2, -2],
        "step_level": [2.5, 3, -2.5, -2, 0, -1],
        "penalty": [0, 0, -0.1, 0, 0, 0],
    }
    assert credit.groups["episode_level"].tolist() == [0] * 6
    assert credit.groups["step_level"].tolist() == [0, 1, 0, 1, 2, 1]
    assert credit.metrics["credit/step_level/share_nonzero"] == pytest.approx(5 / 6)
    assert credit.metrics["credit/penalty/mean"] == pytest.approx(-0.1 / 6)


def test_a_part_without_weight_adds_nothing():
    credit = compute_credit("gigpo", STEPS, step_advantage_w=0.0)
    assert not credit.parts["step_level"].any()
    assert credit.metrics["credit/share_steps_with_step_credit"] > 0


def test_hgpo_says_the_weight_of_each_level_and_who_has_none():
    credit = compute_credit("hgpo", STEPS, norm="mean", gamma=1.0, history=1)
    assert credit.advantage[1] == pytest.approx((6 + 2 * 5) / 3)
    assert {name: part[1] for name, part in credit.parts.items()} == pytest.approx(
        {"level_0": 2, "level_1": 10 / 3, "penalty": 0}
    )
    assert {name: weight[1] for name, weight in credit.levels.items()} == pytest.approx(
        {"weight_of_level_0": 1 / 3, "weight_of_level_1": 2 / 3}
    )
    level_1 = credit.groups["level_1"]
    assert (level_1 == -1).tolist() == [True, False, True, False, True, False]
    assert level_1[1] == level_1[3] != level_1[5]


@dataclass(frozen=True)
class Nothing:
    pass


@pytest.fixture
def returned(monkeypatch):
    """``returned(credit)`` is what an estimator of somebody gives for STEPS."""
    monkeypatch.setattr(registry, "_ESTIMATORS", dict(registry._ESTIMATORS))

    def register(credit):
        registry._ESTIMATORS.pop("mine", None)
        register_estimator("mine", params=Nothing)(lambda batch, params: credit)
        return compute_credit("mine", STEPS)

    return register


ONES, ZEROS = np.ones(6), np.zeros(6)


def test_an_estimator_need_not_name_parts(returned):
    assert returned(Credit(ONES)).parts == {}
    assert "credit/advantage/mean" in returned(Credit(ONES)).metrics


def test_parts_and_levels_are_logged_but_what_the_estimator_logs_prevails(returned):
    own = {"credit/level/mean": 7.0}
    metrics = returned(Credit.of_parts({"half": 0.5 * ONES}, ZEROS, levels={"level": ONES}, metrics=own)).metrics
    assert metrics["credit/half/mean"] == 0.5
    assert (metrics["credit/level/mean"], metrics["credit/level/share_nonzero"]) == (7.0, 1.0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"parts": {"a": ONES[:2]}}, r"expected part 'a' to be 6 finite numbers, one per step, got shape \(2,\)"),
        ({"parts": {"a": ONES * np.inf}}, "expected part 'a' to be 6 finite numbers, one per step, got 6 that are not"),
        ({"levels": {"b": ONES * np.nan}}, "expected level 'b' to be 6 finite numbers"),
        ({"groups": {"c": ONES}}, "expected groups 'c' to be 6 integers >= -1, one per step, got float64 of shape"),
        ({"groups": {"c": np.array([1, 2])}}, r"expected groups 'c' to be 6 integers .*int64 of shape \(2,\)"),
        ({"groups": {"c": np.arange(6) - 2}}, "expected groups 'c' to be 6 integers >= -1.*from -2"),
        ({"parts": {"a": ONES}, "levels": {"a": ONES}}, "'a' is a part and a level; expected different names"),
        (
            {"parts": {"a": ONES, "b": ONES * 0.5}},
            r"expected the parts a, b to add up to the advantage, got 1\.5 for 1 in row 0: .*belongs in Credit\.levels",
        ),
    ],
)
def test_what_is_refused(returned, fields, words):
    with pytest.raises(ValueError, match=f"estimator 'mine': {words}"):
        returned(Credit(ONES, **fields))
