"""Modifiers that read a teacher's log-probabilities: the authors' numbers, naive twins, and no teacher, no change."""

import json
import math
from pathlib import Path

import naive
import numpy as np
import pytest
from estimator_cases import assert_same_credit, table
from hypothesis import given, settings
from hypothesis import strategies as st
from teacher_rows import credit, teacher_rows

from verl_turnkey.advantage import ConfigError, StepBatch, Tokens, compute_credit, modifiers

VALUES = json.loads((Path(__file__).parents[3] / "data" / "oracle" / "teacher_check_values.json").read_text())
OF_TOKENS = {
    "rlsd": [{}, {"lam": 1.0, "decay_steps": None}, {"clip": 0.5, "decay_steps": 5}],
    "opid": [{}, {"weight": 0.5}],
    "trial": [{}, {"coefficient": 2.0}],
    "agent_opsd": [{"granularity": "token"}, {"granularity": "token", "prior": "mean_score", "lam": 1.0}],
}
OF_STEPS = {
    "agent_opsd": [{}, {"prior": "mean_score"}, {"lam": 1.0, "bound": 0.5}],
    "grsd": [{}, {"bound": 3.0}, {"eta": 1.0, "lam": 1.0}, {"success": 1.0}],
    "hcapo": [{}, {"smooth": True, "weight": 0.5}, {"gamma": 1.0, "temperature": 1.0}, {"success": 1.0}],
}
#: Those that leave the credit as it is where no teacher says anything; hcapo adds a discounted return.
IDENTICAL = [
    (name, params) for table in (OF_TOKENS, OF_STEPS) for name in table if name != "hcapo" for params in table[name]
]


def one_group(advantage, extra=None, trajectory=None, **columns):
    """Steps whose method gives them ``advantage`` (through groups of one, or as it is under ``singleton=score``)."""
    steps = len(advantage)
    return StepBatch(
        **{
            "group": range(steps),
            "trajectory": range(steps) if trajectory is None else trajectory,
            "step": range(steps),
            "reward": [0.0] * steps,
            "score": advantage,
            "extra": extra or {},
            **columns,
        }
    )


@pytest.mark.parametrize(("scale", "key"), [(1, "plus"), (-1, "minus"), (0, "zero")])
def test_rlsd_has_the_authors_numbers(scale, key):
    case = VALUES["rlsd"]
    batch = one_group([scale * case["A"]], {"teacher_gap": [sum(case["D"])]})
    got = compute_credit(
        "grpo_steps", batch, modify=[{"name": "rlsd", "decay_steps": None}], singleton="score",
        tokens=Tokens([0] * len(case["D"]), case["D"]),
    )  # fmt: skip
    np.testing.assert_allclose(got.tokens, case[key], atol=1e-6)


def test_rlsd_decays_with_the_training_step():
    params = modifiers()["rlsd"].params
    for step, share in VALUES["rlsd"]["lam"].items():
        assert params().share(int(step)) == pytest.approx(share)
    assert params(decay_steps=50).share(25) == pytest.approx(0.25)
    assert params().share(101) == 0.0
    batch, far = one_group([1.0], {"teacher_gap": [2.0]}), Tokens([0], [2.0], training_step=100)
    assert compute_credit("grpo_steps", batch, modify=["rlsd"], tokens=far, singleton="score").tokens.tolist() == [1.0]


@pytest.mark.parametrize(
    ("key", "sign", "prior", "score"),
    [("plus", 1, 0.5, 0.5), ("minus", -1, 0.5, 0.5), ("reward10_v0=2.5", 1, 2.5, 2.5)],
)
def test_agent_opsd_has_the_authors_numbers(key, sign, prior, score):
    """The prior is the mean score of the group, whose only trajectory has the credit ``score``, up to its sign."""
    gaps, case = [2.0, -1.0, 0.5], VALUES["agentopsd"][key]
    batch = one_group(
        [score] * 3, {"teacher_gap": gaps}, trajectory=[0] * 3, group=[0] * 3, penalty=[0.0] * 3
    )  # fmt: skip
    base = ["grpo_steps", batch]
    got = compute_credit(*base, modify=[{"name": "agent_opsd", "prior": "mean_score"}], singleton="score")
    if sign > 0:
        np.testing.assert_allclose(got.advantage / score, case["A"], atol=1e-5)
    np.testing.assert_allclose(got.levels["agent_opsd/belief_change"], case["q"], atol=1e-6)
    rows = [
        {"trajectory": 0, "step": t, "group": 0, "success": False, "score": prior, "gaps": [gap]}
        for t, gap in enumerate(gaps)
    ]
    np.testing.assert_allclose(naive.agent_opsd(rows, [sign] * 3, prior="mean_score"), case["A"], atol=1e-5)


@pytest.mark.parametrize(("bound", "key"), [(0.2, "A_gmax02"), (3.0, "A_gmax3")])
def test_grsd_has_the_authors_numbers(bound, key):
    """Four episodes of one step, two won and two lost: grpo_steps gives them 1 and -1 after scaling."""
    case = VALUES["grsd"]
    scores = [0.5 + 0.5 * a for a in case["A"]]
    batch = table(scores, teacher_gap_mean=case["delta"])
    modify = [{"name": "grsd", "bound": bound}]
    plain, got = (compute_credit("grpo_steps", batch, norm="mean", modify=m) for m in ([], modify))
    np.testing.assert_allclose(got.advantage / np.abs(plain.advantage), case[key], atol=1e-6)


@pytest.mark.parametrize("key", ["step_priority", "additive", "no_step"])
def test_opid_has_the_spec_numbers(key):
    """Two texts at once, as in the mode ``additive``, are the sum of their gaps."""
    gaps = {"step_priority": [0.3, -0.2], "additive": [0.4, -0.1], "no_step": [0.1, 0.1]}[key]
    batch = one_group([0.5], {"teacher_gap": [sum(gaps)]})
    got = compute_credit("grpo_steps", batch, modify=["opid"], singleton="score", tokens=Tokens([0, 0], gaps))
    np.testing.assert_allclose(got.tokens, VALUES["opid"][key], atol=1e-9)


def test_trial_has_the_spec_numbers():
    """The weighted gaps themselves, under an advantage too large for the clamp."""
    batch = one_group([9.0, 9.0], {"teacher_gap": [0.2, 0.05]}, trajectory=[0, 0], group=[0, 0])
    tokens = Tokens([0, 0, 1], [0.3, -0.1, 0.05])
    modify = [{"name": "trial", "coefficient": 1.0}]
    got = compute_credit("grpo_steps", batch, modify=modify, singleton="score", tokens=tokens)
    np.testing.assert_allclose(got.tokens - 9.0, VALUES["trial_own"]["signed"], atol=1e-6)


def test_trial_is_clamped_by_the_advantage():
    batch = one_group([0.1, 0.0], {"teacher_gap": [3.0, 1.0]}, trajectory=[0, 0], group=[0, 0], score=[0.1, 0.1])
    modify = [{"name": "trial", "coefficient": 1.0}]
    got = compute_credit(
        "grpo_steps", batch, modify=modify, singleton="score", tokens=Tokens([0, 0, 1], [3.0, -3.0, 1.0])
    )
    np.testing.assert_allclose(got.tokens, [0.2, 0.0, 0.2], atol=1e-12)


@pytest.mark.parametrize(("means", "key"), [([-0.5, -1.0, -2.0], "rho"), ([-0.1, -0.1, -12.0], "clipped")])
def test_hcapo_has_the_spec_numbers(means, key):
    batch = one_group([1.0] * 3, {"teacher_log_prob_mean": means}, trajectory=[0] * 3, group=[0] * 3)
    got = compute_credit("grpo_steps", batch, modify=["hcapo"])
    np.testing.assert_allclose(got.levels["hcapo/hindsight_ratio"], VALUES["hcapo"][key], atol=1e-6)
    if key == "rho":
        np.testing.assert_allclose(got.levels["hcapo/hindsight_value"], VALUES["hcapo"]["Q_success"], atol=1e-6)
    lost = one_group([0.0] * 3, {"teacher_log_prob_mean": means}, trajectory=[0] * 3, group=[0] * 3)
    assert not compute_credit("grpo_steps", lost, modify=["hcapo"]).advantage.any()


EPISODE = np.array([0, 0, 1, 2, 2, 3, 3])
PARTIAL = np.array([1.0, 0.3, 0.2, 0.4])[EPISODE]
"""scores of four episodes, of which the first is solved, on each of their turns"""


def partial(name, kl=0.0, **columns):
    """Credit of the episodes of ``PARTIAL`` by the modifier ``name``; ``kl`` is in each score."""
    rows = {"group": [0] * 7, "trajectory": EPISODE, "step": [0, 1, 0, 0, 1, 0, 1], "score": PARTIAL + kl}
    extra = {"teacher_log_prob_mean": [-1.0] * 7, "teacher_gap_mean": [-1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 1.0]}
    return compute_credit("grpo_steps", StepBatch(reward=[0.0] * 7, extra=extra, **rows, **columns), modify=[name])


@pytest.mark.parametrize("by", [{"success": PARTIAL == 1}, {"env_return": np.floor(PARTIAL)}])
def test_success_is_the_flag_else_the_environments_return_and_never_a_score_above_0(by):
    """Of the last turns Q is 1, 0.3, 0.2 and 0.4, of the first ones 0.95 times that; all seven have mean 0.4886."""
    np.testing.assert_allclose(partial("hcapo", **by).advantage[[2, 4, 6]], [-1.04, -1.61, -0.47], atol=0.005)
    factor = partial("grsd", **by).levels["grsd/factor"]
    np.testing.assert_allclose(factor, [0.9, 1.1, 1.1, 1.1, 0.9, 1.1, 0.9])
    for name in ("hcapo", "grsd"):
        change = partial(name, kl=1e-4 * EPISODE, **by).advantage - partial(name, **by).advantage
        assert 0 < np.abs(change).max() < 0.01


def test_a_modifier_of_rewards_leaves_who_solved_the_task():
    """unlikeliness takes the likeliest episode's score below the bound; it is solved all the same."""
    columns = {"group": [0, 0], "trajectory": [0, 1], "step": [0, 0], "reward": [1.0, 0.0], "tokens": [1, 1]}
    extra = {"log_prob": [-0.1, -2.0], "teacher_gap_mean": [1.0, 1.0]}
    modify = [{"name": "grsd", "success": 0.9}, {"name": "unlikeliness", "beta": 1.0}]
    credit = compute_credit("grpo_steps", StepBatch(**columns, extra=extra), modify=modify)
    assert credit.levels["unlikeliness/reward_factor"].tolist() == [0.5, 1.0]
    np.testing.assert_allclose(credit.levels["grsd/factor"], [1.1, 0.9])


def test_hcapo_compares_turns_whose_probabilities_round_to_zero():
    """exp(-800) is 0 in float64, and the ratios of three such turns are those of turns 790 nats likelier."""
    columns = {"trajectory": [0] * 3, "group": [0] * 3}
    unlikely, likely = (
        compute_credit(
            "grpo_steps",
            one_group([1.0] * 3, {"teacher_log_prob_mean": [far - 800.0, far - 800.1, far - 799.9]}, **columns),
            modify=[{"name": "hcapo", "temperature": 1.0}],
        )
        for far in (0.0, 790.0)
    )
    np.testing.assert_allclose(unlikely.levels["hcapo/hindsight_ratio"], likely.levels["hcapo/hindsight_ratio"])
    assert len({*unlikely.levels["hcapo/hindsight_ratio"].tolist()}) == 3


@pytest.mark.parametrize(("name", "params"), [(name, params) for name in OF_TOKENS for params in OF_TOKENS[name]])
@settings(max_examples=30, deadline=None)
@given(rows=teacher_rows())
def test_tokens_equal_the_naive_twin(name, params, rows):
    step = {"training_step": 7} if name == "rlsd" else {}
    got = credit(rows, {"name": name, **params})
    expected = getattr(naive, name)(rows, credit(rows).advantage.tolist(), **params, **step)
    assert_same_credit(got.tokens, [value for tokens in expected for value in tokens])


@pytest.mark.parametrize(("name", "params"), [(name, params) for name in OF_STEPS for params in OF_STEPS[name]])
@settings(max_examples=30, deadline=None)
@given(rows=teacher_rows(), flags=st.booleans())
def test_steps_equal_the_naive_twin(name, params, rows, flags):
    if not flags and name != "agent_opsd":  # which needs them
        rows = [{key: value for key, value in row.items() if key != "success"} for row in rows]
    got = credit(rows, {"name": name, **params})
    np.testing.assert_allclose(
        got.advantage, getattr(naive, name)(rows, credit(rows).advantage.tolist(), **params), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize(("name", "params"), IDENTICAL)
@settings(max_examples=20, deadline=None)
@given(rows=teacher_rows(text=False), silent=teacher_rows(gaps=(0.0,)))
def test_without_a_text_or_a_gap_the_credit_is_the_methods_exactly(name, params, rows, silent):
    for batch in (rows, silent):
        got, plain = (credit(batch, *modify) for modify in ([{"name": name, **params}], []))
        assert got.advantage.tolist() == plain.advantage.tolist()
        if got.tokens is not None:
            assert got.tokens.tolist() == [
                a for a, row in zip(plain.advantage, batch, strict=True) for _ in row["gaps"]
            ]


def test_without_a_text_hcapo_adds_a_discounted_return():
    columns = {"trajectory": [0, 0, 1], "group": [0, 0, 0], "score": [1.0, 1.0, 0.0]}
    batch = one_group([1.0] * 3, {"teacher_log_prob_mean": [np.nan] * 3}, **columns)
    plain, got = (compute_credit("grpo_steps", batch, modify=m) for m in ([], ["hcapo"]))
    values = np.array([0.95, 1.0, 0.0])
    np.testing.assert_allclose(
        got.advantage - plain.advantage, (values - values.mean()) / (values.std(ddof=1) + 1e-6), atol=1e-9
    )


@pytest.mark.parametrize(("name", "params"), [case for case in IDENTICAL if case[0] != "grsd"])
@pytest.mark.parametrize("size", [1e-4, 1e-9])
def test_a_vanishing_gap_changes_the_credit_vanishingly(name, params, size):
    """agent_opsd divides by the deviation of its beliefs plus 1e-6: below that, and no earlier, its factor is 1."""
    draw = np.random.default_rng(0)
    rows = [
        {
            "group": 0, "trajectory": k, "step": t, "reward": 0.0, "score": float(k % 2), "success": bool(k % 2),
            "penalty": 0.0, "has_text": True, "gaps": (size * draw.normal(size=4)).tolist(), "teacher": [-1.0] * 4,
        }
        for k in range(4) for t in range(3)
    ]  # fmt: skip
    got, plain = (credit(rows, *modify) for modify in ([{"name": name, **params}], []))
    change = np.abs(got.advantage - plain.advantage).max()
    if name != "agent_opsd":
        assert change < 10 * size
    elif size > 1e-6 and params.get("granularity") != "token":
        assert change > 0.01  # z has unit size however small the gaps are
    else:
        assert change < (0.05 if size > 1e-6 else 1e-3)


def test_the_sign_of_a_vanishing_gap_decides_grsd():
    """Terms are relative to the group's mean: its size cancels down to 1e-6."""

    def change(size):
        batch = table([1, 1, 0, 0], teacher_gap_mean=size * np.array([0.2, -0.1, 0.3, -0.05]))
        plain, got = (compute_credit("grpo_steps", batch, modify=m).advantage for m in ([], ["grsd"]))
        return (got / plain).round(3).tolist()

    assert change(1.0) == change(1e-3) == [1.1, 0.9, 0.9, 1.1]
    assert change(1e-9) == [1.0] * 4


def test_a_prior_of_a_group_is_a_success_rate_whatever_success_pays():
    columns = {"group": [0] * 3, "trajectory": [0, 0, 1], "step": [0, 1, 0], "reward": [0.0, 10.0, 0.0]}
    batch = StepBatch(**columns, success=[False, True, False], extra={"teacher_gap": [1.0, 0.5, -1.0]})
    by_rate, by_score = (
        compute_credit("grpo_steps", batch, modify=[{"name": "agent_opsd", "prior": prior}])
        for prior in ("success_rate", "mean_score")
    )
    first = 1 / (1 + math.exp(-1.0))
    np.testing.assert_allclose(by_rate.levels["agent_opsd/belief_change"][:1], [first - 0.5], atol=1e-9)
    assert by_score.levels["agent_opsd/belief_change"][0] < 1e-4


@pytest.mark.parametrize("name", ["rlsd", "agent_opsd", "grsd", "hcapo", "opid", "trial"])
def test_columns_that_are_missing_are_named(name):
    batch = table([0.0], success=[True])
    with pytest.raises(ConfigError, match=rf"modifier '{name}' needs the column 'extra\.teacher_.*trainers supply it"):
        compute_credit("grpo_steps", batch, modify=[name], tokens=Tokens([0], [0.0]))
