"""gigpo and grpo_steps: reference outputs, hand examples, the naive twins, and what must not matter."""

import json
from pathlib import Path

import naive_credit
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import StepBatch, compute_credit
from verl_turnkey.advantage.segments import discounted_returns

ORACLE = Path(__file__).parents[2] / "data" / "oracle"
NORMS = {"mean_std": "mean_std_norm", "mean": "mean_norm"}
TOLERANCE = {"mean_std": 1e-4, "mean": 2e-5}  # the reference computes in float32


def cases(name):
    found = json.loads((ORACLE / f"{name}.json").read_text())["cases"]
    return [pytest.param(case, id=case["id"]) for case in found]


def oracle_batch(case):
    inputs, params = case["inputs"], case["params"]
    cost = params.get("invalid_action_penalty_coef", 0.0)
    return StepBatch(
        group=inputs["uid"],
        trajectory=inputs["traj_uid"],
        step=inputs["step_idx"],
        reward=inputs["raw_step_reward"],
        anchor=inputs["anchor_obs"],
        penalty=[0.0 if valid else cost for valid in inputs["is_action_valid"]],
    )


def assert_rows(got, expected_tokens, case, norm):
    """The reference spreads a row's credit over the tokens of its response mask."""
    mask = np.array(case["inputs"]["response_mask"])
    assert mask.any(), "a case without tokens would compare nothing"
    np.testing.assert_allclose(got[:, None] * mask, np.array(expected_tokens), rtol=0, atol=TOLERANCE[norm])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("case", [*cases("gigpo"), *cases("gigpo_structured_anchor")])
def test_gigpo_equals_the_reference(case, norm):
    params, expected = case["params"], case["expected"][NORMS[norm]]
    common = {"gamma": params["gamma"], "norm": norm, "singleton": "score", "epsilon": params["epsilon"]}
    batch = oracle_batch(case)
    credit = compute_credit("gigpo", batch, scope="steps", step_advantage_w=params["step_advantage_w"], **common)
    assert_rows(credit.advantage, expected["advantages"], case, norm)
    np.testing.assert_allclose(credit.returns, case["inputs"]["step_returns"], rtol=0, atol=2e-5)
    if "episode_adv" in expected:
        episode = compute_credit("gigpo", batch, scope="steps", step_advantage_w=0, **common).advantage
        assert_rows(episode, expected["episode_adv"], case, norm)
        with_step = compute_credit("gigpo", batch, scope="steps", step_advantage_w=1, **common).advantage
        assert_rows(with_step - episode, expected["step_adv"], case, norm)
        paper = compute_credit("gigpo", batch, scope="trajectories", step_advantage_w=0, **common).advantage
        assert_rows(paper, expected["episode_adv_per_trajectory_stats"], case, norm)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scope", ["steps", "trajectories"])
@pytest.mark.parametrize("case", cases("baselines_grpo_rloo"))
def test_grpo_steps_equals_the_reference(case, scope, norm):
    statistics = {"steps": "cross_step_stats", "trajectories": "per_trajectory_stats"}[scope]
    expected = case["expected"][statistics][{"mean_std": "grpo_std", "mean": "grpo_nostd"}[norm]]
    credit = compute_credit("grpo_steps", oracle_batch(case), scope=scope, norm=norm, singleton="score")
    assert_rows(credit.advantage, expected, case, norm)


@pytest.mark.parametrize("case", cases("step_discounted_returns"))
def test_discounted_returns_equal_the_reference(case):
    inputs = case["inputs"]
    trajectories = inputs["traj_uid"]
    batch = StepBatch(
        group=["g"] * len(trajectories),
        trajectory=trajectories,
        step=inputs["step_idx"],
        reward=inputs["raw_step_reward"],
    )
    got = discounted_returns(batch.reward, batch.runs, case["params"]["gamma"])
    np.testing.assert_allclose(got, case["expected"]["step_returns"], rtol=0, atol=2e-5)


@pytest.mark.parametrize("scope", ["steps", "trajectories"])
@pytest.mark.parametrize("case", cases("zero_variance_float32"))
def test_a_constant_group_gets_exactly_nothing(case, scope):
    value, n = case["inputs"]["value"], case["inputs"]["group_size"]
    batch = StepBatch(group=["g"] * n, trajectory=range(n), step=[0] * n, reward=[value] * n, anchor=["s"] * n)
    assert compute_credit("gigpo", batch, scope=scope).advantage.tolist() == [0.0] * n
    assert compute_credit("gigpo", batch, scope=scope, norm="mean").advantage.tolist() == [0.0] * n


HAND = {
    "group": ["g"] * 5,
    "trajectory": ["t0", "t0", "t1", "t1", "t1"],
    "step": [0, 1, 0, 1, 2],
    "reward": [0.0, 10.0, 0.0, 0.0, 0.0],
    "anchor": ["A", "B", "A", "C", "A"],
}


def test_hand_example_of_the_paper_and_of_its_code():
    batch = StepBatch(**HAND)
    code = compute_credit("gigpo", batch, norm="mean", scope="steps")
    assert code.returns.tolist() == [9.5, 10.0, 0.0, 0.0, 0.0]
    np.testing.assert_allclose(code.advantage, [37 / 3, 6, -43 / 6, -4, -43 / 6], atol=1e-12)
    code = compute_credit("gigpo", batch, norm="mean_std", scope="steps").advantage
    np.testing.assert_allclose(code, [2.250145, 1.095445, -1.307647, -0.730297, -1.307647], atol=1e-6)
    paper = compute_credit("gigpo", batch, norm="mean").advantage
    np.testing.assert_allclose(paper, [5 + 19 / 3, 5, -5 - 19 / 6, -5, -5 - 19 / 6], atol=1e-12)
    episode = compute_credit("grpo_steps", batch).advantage
    np.testing.assert_allclose(episode, np.array([1, 1, -1, -1, -1]) / np.sqrt(2), atol=1e-6)


def test_metrics_of_the_hand_example():
    metrics = compute_credit("gigpo", StepBatch(**HAND)).metrics
    assert metrics["credit/groups"] == 1
    assert metrics["credit/anchor_groups"] == 3
    assert metrics["credit/anchor_group_size/mean"] == pytest.approx(5 / 3)
    assert metrics["credit/anchor_group_size/max"] == 3
    assert metrics["credit/share_steps_in_anchor_groups"] == pytest.approx(0.6)
    assert metrics["credit/share_steps_with_step_credit"] == pytest.approx(0.6)
    assert metrics["credit/episode_level/share_nonzero"] == 1
    assert metrics["credit/step_level/mean"] == pytest.approx(0, abs=1e-9)
    assert metrics["credit/step_level/std"] > 0


def test_none_never_matches_and_equal_states_of_two_groups_do_not_either():
    rows = {**HAND, "anchor": [None] * 5}
    assert compute_credit("gigpo", StepBatch(**rows)).metrics["credit/share_steps_in_anchor_groups"] == 0
    rows = {**HAND, "group": ["g", "g", "h", "h", "h"], "anchor": ["A", "B", "A", "C", "D"]}
    assert compute_credit("gigpo", StepBatch(**rows)).metrics["credit/share_steps_in_anchor_groups"] == 0


@pytest.mark.parametrize(("singleton", "expected"), [("zero", 0.0), ("score", 3.0)])
def test_group_of_one(singleton, expected):
    batch = StepBatch(group=["g"] * 2, trajectory=["t"] * 2, step=[0, 1], reward=[1.0, 2.0], anchor=["A", "B"])
    for norm in NORMS:
        credit = compute_credit("gigpo", batch, singleton=singleton, norm=norm)
        assert credit.advantage.tolist() == [expected] * 2
        assert compute_credit("grpo_steps", batch, singleton=singleton, norm=norm).advantage.tolist() == [expected] * 2


def test_late_penalty_in_a_group_without_signal_is_not_blown_up():
    """All trajectories failed, one later step was invalid: its deviation must not be divided by epsilon alone."""
    rows = {"group": ["g"] * 4, "trajectory": ["a", "a", "b", "b"], "step": [0, 1, 0, 1], "reward": [0.0] * 4}
    batch = StepBatch(**rows, penalty=[0, 0.1, 0, 0])
    assert compute_credit("grpo_steps", batch).advantage.tolist() == [0, 0, 0, 0]
    assert compute_credit("grpo_steps", batch, norm="mean").advantage.tolist() == [0, -0.1, 0, 0]


def test_penalty_stays_on_its_own_step():
    batch = StepBatch(**HAND, penalty=[0, 0.5, 0, 0, 0])
    returns = compute_credit("gigpo", batch).returns
    assert returns.tolist() == [9.5, 9.5, 0, 0, 0]


def test_no_steps():
    batch = StepBatch(group=[], trajectory=[], step=[], reward=[], anchor=[])
    for name in ("gigpo", "grpo_steps"):
        credit = compute_credit(name, batch)
        assert credit.advantage.shape == (0,)
        assert all(np.isfinite(value) for value in credit.metrics.values())


@st.composite
def step_rows(draw):
    """Ragged trajectories in groups of any size, few states and few reward values so that they meet, in any order."""
    rows = []
    for group in range(draw(st.integers(1, 4))):
        for trajectory in range(draw(st.integers(1, 4))):
            steps = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True))
            for step in steps:
                rows.append(
                    {
                        "group": f"g{group}",
                        "trajectory": f"g{group}t{trajectory}",
                        "step": step,
                        "reward": draw(st.sampled_from([0.0, 0.0, 1.0, 10.0, -0.3, 0.1, 1e4])),
                        "penalty": draw(st.sampled_from([0.0, 0.0, 0.1])),
                        "anchor": draw(st.sampled_from(["A", "B", 3, (1, 2), None])),
                    }
                )
    if draw(st.booleans()):
        for row in rows:
            row["score"] = draw(st.sampled_from([0.0, 1.0, 10.0]))
    return draw(st.permutations(rows))


def as_batch(rows):
    return StepBatch(**{name: [row[name] for row in rows] for name in rows[0]})


PARAMS = {
    "norm": st.sampled_from(["mean_std", "mean"]),
    "scope": st.sampled_from(["trajectories", "steps"]),
    "singleton": st.sampled_from(["zero", "score"]),
    "epsilon": st.sampled_from([1e-6, 1e-3]),
}
gigpo_params = st.fixed_dictionaries(
    {**PARAMS, "gamma": st.sampled_from([0.0, 0.5, 0.95, 1.0]), "step_advantage_w": st.sampled_from([0.0, 0.5, 1.0])}
)


def test_rounding_is_no_spread():
    """Nobody gained anything, but a sum says 5e-17; a penalised row would be -1e5 standard deviations away."""
    batch = StepBatch(
        group=["g"] * 4,
        trajectory=["t0", "t0", "t0", "t1"],
        step=[0, 1, 2, 0],
        reward=[0.1, 0.2, -0.3, 0.0],
        penalty=[0.0, 0.1, 0.0, 0.0],
    )
    assert 0 < batch.score[0] < 1e-16, "or this shows nothing"
    assert not compute_credit("grpo_steps", batch).advantage.any()


@settings(max_examples=200, deadline=None)
@given(step_rows(), gigpo_params)
def test_gigpo_equals_its_naive_twin(rows, params):
    credit = compute_credit("gigpo", as_batch(rows), **params)
    np.testing.assert_allclose(credit.advantage, naive_credit.gigpo(rows, **params), rtol=1e-7, atol=1e-7)


@settings(max_examples=200, deadline=None)
@given(step_rows(), st.fixed_dictionaries(PARAMS))
def test_grpo_steps_equals_its_naive_twin(rows, params):
    credit = compute_credit("grpo_steps", as_batch(rows), **params)
    np.testing.assert_allclose(credit.advantage, naive_credit.grpo_steps(rows, **params), rtol=1e-7, atol=1e-7)


@settings(max_examples=100, deadline=None)
@given(step_rows(), gigpo_params, st.randoms(use_true_random=False))
def test_row_order_and_names_change_no_bit(rows, params, random):
    before = compute_credit("gigpo", as_batch(rows), **params).advantage
    order = list(range(len(rows)))
    random.shuffle(order)
    renamed = [
        {
            **rows[i],
            "group": hash(rows[i]["group"]),
            "trajectory": ["id", rows[i]["trajectory"]],
            "anchor": None if rows[i]["anchor"] is None else {"state": rows[i]["anchor"]},
        }
        for i in order
    ]
    after = compute_credit("gigpo", as_batch(renamed), **params).advantage
    assert after.tolist() == before[order].tolist()


@settings(max_examples=100, deadline=None)
@given(step_rows())
def test_step_level_sums_to_nothing_in_every_anchor_group(rows):
    batch = as_batch(rows)
    with_step = compute_credit("gigpo", batch, norm="mean").advantage
    step = with_step - compute_credit("gigpo", batch, norm="mean", step_advantage_w=0).advantage
    sums: dict = {}
    for row, value in zip(rows, step, strict=True):
        sums[row["group"], row["anchor"]] = sums.get((row["group"], row["anchor"]), 0) + value
    np.testing.assert_allclose(list(sums.values()), 0, atol=1e-6)
