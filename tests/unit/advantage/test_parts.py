"""Why a step got its credit: parts that add up, groups of whom was compared with whom, and what is refused."""

from dataclasses import dataclass

import numpy as np
import pytest
from estimator_cases import table

from verl_turnkey.advantage import (
    Credit,
    Tokens,
    compute_credit,
    describe_part,
    modifiers,
    register_estimator,
    registry,
)

STEPS = table(
    [0, 10, 0, 0, 0, 2], [1, 1, 2, 2, 3, 3], anchor=["A", "B", "A", "B", "C", "B"], penalty=[0, 0, 0.1, 0, 0, 0]
)


def rounded(mapping):
    return {name: np.round(values, 6).tolist() for name, values in mapping.items()}


def test_gigpo_says_what_each_level_adds_and_who_was_compared():
    credit = compute_credit("gigpo", STEPS, norm="mean", gamma=1.0, step_advantage_w=0.5)
    assert rounded(credit.parts) == {
        "episode_level": [6, 6, -4, -4, -2, -2],
        "step_level": [2.5, 3, -2.5, -2, 0, -1],
        "penalty": [0, 0, -0.1, 0, 0, 0],
    }
    assert credit.groups["episode_level"].tolist() == [0] * 6
    assert credit.groups["step_level"].tolist() == [0, 1, 0, 1, 2, 1]
    assert credit.metrics["credit/step_level/share_nonzero"] == pytest.approx(5 / 6)
    assert credit.metrics["credit/penalty/mean"] == pytest.approx(-0.1 / 6)


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


def test_whitening_is_one_shift_for_all():
    batch = table([1, 0, 0], potential=[0.9, 0.1, 0.5])
    credit = compute_credit("step_potential", batch)
    assert np.ptp(credit.parts["whitening"]) == pytest.approx(0, abs=1e-12)
    ratio = credit.parts["step_level"] / credit.levels["potential_gain"]
    assert np.ptp(ratio) == pytest.approx(0, abs=1e-12)
    assert ratio[0] > 0.5, "divided by the deviation, which is below 1"


def test_salt_says_what_sharing_an_edge_changed():
    batch = table([0, 1, 0, 0], [0, 0, 1, 1], anchor=["s", "t", "s", "t"], action=["go", "win", "go", "lose"])
    credit = compute_credit("salt", batch, norm="mean")
    assert rounded(credit.parts) == {
        "trajectory_credit": [0.5, 0.5, -0.5, -0.5],
        "edge_level": [-0.5, 0, 0.5, 0],
        "penalty": [0] * 4,
    }
    first, won, same, lost = credit.groups["edge_level"].tolist()
    assert first == same
    assert len({first, won, lost}) == 3


def test_a_tree_says_who_are_siblings_and_seeupo_what_it_clips():
    """Two episodes fork after one step that both hold."""
    batch = table([0, 1, 0, 0], [0, 0, 1, 1], parent=["", "a", "", "a"])
    credit = compute_credit("tree", batch, norm="mean", fork_w=2.0)
    assert rounded(credit.parts)["fork_level"] == [0, 1, 0, -1]
    assert rounded(credit.levels) == {"leaf_mean": [0.5, 1, 0.5, 0]}
    shared, branch, same, other = credit.groups["fork_level"].tolist()
    assert (shared, branch) == (same, other)
    assert shared != branch
    credit = compute_credit("seeupo", batch, clamp=0.5)
    assert rounded(credit.parts)["clipping"] == np.round(np.array([-1, -1, 1, 1]) * (0.5**0.5 - 0.5), 6).tolist()


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
        (
            {"parts": {"a": ONES}, "levels": {"b": ONES}, "groups": {"c": np.arange(6)}},
            r"expected each name in groups to be a part or level \(a, b\), got 'c'",
        ),
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


@pytest.mark.parametrize("name", modifiers())
@pytest.mark.parametrize("penalty", [0.0, 0.25])
def test_what_each_modifier_changed_adds_up_and_is_explained(name, penalty):
    extra = {"entropy": [0.1, 0.5, 0.9, 0.2], "log_prob": [-1.0, -2.0, -3.0, 0.0], "tool_calls": [1, 0, 2, 3]}
    extra |= {name: [-0.1, 0.3, -0.2, -0.4] for name in ("teacher_gap", "teacher_gap_mean", "teacher_log_prob_mean")}
    extra |= {name: [1.0, 2.0, 3.0, 4.0] for name in ("rank", "rank_velocity", "rank_acceleration")}
    extra["gold_probability"] = [0.1, 0.4, 0.3, 0.8]
    batch = table(
        [1, 0, 1, 1],
        group="aabb",
        penalty=[penalty, 0, 0, penalty],
        success=[True, False, True, True],
        tokens=[3, 4, 5, 9],
        extra={**extra, "answer": [*"xyxx"], "task": [*"ttuu"]},
    )
    tokens = Tokens([0, 0, 1, 2, 3], [0.2, -0.4, 0.1, -0.3, 0.05])
    state = {f"modify/{name}/t": 0.0, **{f"modify/{name}/{key}": 0.5 for key in extra if key.startswith("rank")}}
    inputs = {"state": state, "tokens": tokens}
    credit = compute_credit("grpo_steps", batch, modify=[name], norm="mean", **inputs)
    np.testing.assert_allclose(sum(credit.parts.values()), credit.advantage, rtol=1e-12, atol=1e-12)
    assert list(credit.parts) == ["episode_level", "penalty", name]
    other = ("unlikeliness", "agent_opsd", "trace")  # one changes the rewards, not the credit; and these have one turn
    assert credit.parts[name].any() == (name not in other)
    for key in (*credit.parts, *credit.levels):
        assert describe_part(key, "grpo_steps"), key
        assert f"credit/{key}/share_nonzero" in credit.metrics


def test_what_a_name_means():
    assert describe_part("level_3") == describe_part("level_<k>").replace("<k>", "3")
    assert describe_part("step_level", "progress") != describe_part("step_level", "gigpo")
    assert describe_part("step_level", "gigpo") == describe_part("step_level")
    assert describe_part("empg") == f"What the modifier empg changed: it {modifiers()['empg'].summary}."
    assert describe_part("mine") is None
    assert describe_part("level_x") is None
