"""a_grae, copo, dynamo_modulation, shrinkage and unlikeliness: check values, twins, and state."""

import math

import naive
import numpy as np
import pytest
from estimator_cases import as_batch, assert_same_credit, step_rows, table, with_gaps, with_rates
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit


# --- twins ------------------------------------------------------------------------------------------------------------
@settings(max_examples=40)
@given(step_rows().map(with_rates), st.sampled_from([0.5, 1.0]))
def test_a_grae(rows, alpha):
    got = compute_credit("a_grae", as_batch(rows), alpha=alpha).advantage
    assert_same_credit(got, naive.a_grae(rows, alpha=alpha))


@settings(max_examples=40)
@given(step_rows("answer"), st.fixed_dictionaries({"rho": st.sampled_from([0.5, 1.5]), "gamma": st.just(2.0)}))
def test_copo(rows, params):
    assert_same_credit(compute_credit("copo", as_batch(rows), **params).advantage, naive.copo(rows, **params))


@settings(max_examples=40)
@given(
    step_rows("tokens", "entropy", "log_prob").map(with_gaps),
    st.fixed_dictionaries({"threshold": st.sampled_from([0.3, 0.99])}),
)
def test_dynamo_modulation(rows, params):
    got = compute_credit("dynamo_modulation", as_batch(rows), **params).advantage
    assert_same_credit(got, naive.dynamo_modulation(rows, **params))


@settings(max_examples=40)
@given(step_rows("prior").map(with_rates), st.sampled_from([{}, {"low": -3.0, "high": 2.0}]))
def test_shrinkage(rows, params):
    got = compute_credit("shrinkage", as_batch(rows), prior="given", **params).advantage
    assert_same_credit(got, naive.shrinkage(rows, **params))


@settings(max_examples=40)
@given(step_rows("tokens", "log_prob"), st.sampled_from([0.25, 1.0]))
def test_unlikeliness(rows, beta):
    got = compute_credit("unlikeliness", as_batch(rows), beta=beta).advantage
    assert_same_credit(got, naive.unlikeliness(rows, beta=beta))


# --- check values and what only one of them does ----------------------------------------------------------------------
def test_a_grae_check_values():
    """w = 0.5, p = 0.25 in the first group."""
    batch = table([1, 0, 0, 0, 1, 1, 1, 0], group="aaaabbbb")
    for alpha, first in ((1.0, 0.5915), (0.5, 1.1830)):
        got = compute_credit("a_grae", batch, alpha=alpha)
        np.testing.assert_allclose(got.advantage[:4], [first, *[-0.3943] * 3], atol=1e-4)
        assert got.metrics["credit/a_grae/damping"] == min(1.0, 0.5 / alpha)


@pytest.mark.parametrize(("answers", "entropy", "weight"), [("aaaa", 0, 0), ("abcd", 4, 0.0933), ("abcde", 5, 0.8992)])
def test_copo_check_values(answers, entropy, weight):
    metrics = compute_credit("copo", table([0] * len(answers), answer=[*answers])).metrics
    assert metrics["credit/copo/entropy/mean"] == pytest.approx(math.log(max(entropy, 1)), abs=1e-12)
    assert metrics["credit/copo/weight/mean"] == pytest.approx(weight, abs=1e-4)


def test_copo_takes_the_last_answer_that_was_given():
    """An invalid turn's 0 and a nan are none; the two trajectories without an answer agree."""
    batch = table(
        [0] * 6,
        [0, 0, 0, 1, 2, 3],
        valid=[True, True, False, True, True, True],
        answer=[7, 8, 0, 8, None, float("nan")],
    )
    entropy = compute_credit("copo", batch).metrics["credit/copo/entropy/mean"]
    assert entropy == pytest.approx(math.log(2), abs=1e-12)


def test_copo_takes_an_empty_answer_for_none_and_any_structure_for_one():
    def weighted(*answers):
        batch = table([1, 0, 0, 1], group="gghh", answer=[*answers, "a", "b"])
        return compute_credit("copo", batch).metrics["credit/copo/entropy/mean"]

    assert weighted("", None) == weighted("a", "a") == pytest.approx(math.log(2) / 2)
    assert weighted([1, 2], [1, 2]) == weighted("a", "a")
    assert weighted(np.array([1, 2]), np.array([1, 3])) == pytest.approx(math.log(2))


@pytest.mark.parametrize(
    ("prior", "outcome", "weight", "baseline"), [(0, 1, 0.75, 0.75), (0, 0.5, 0, 0), (0.5, -1, 0.8889, -0.8333)]
)
def test_shrinkage_check_values(prior, outcome, weight, baseline):
    batch = table([outcome] * 4, prior=[prior] * 4)
    credit = compute_credit("shrinkage", batch, low=-1.0, high=1.0, prior="given")
    np.testing.assert_allclose(credit.advantage, [outcome - baseline] * 4, atol=1e-4)
    assert credit.metrics["credit/shrinkage/weight/mean"] == pytest.approx(weight, abs=1e-4)


@settings(max_examples=20)
@given(step_rows("prior").map(with_rates))
def test_shrinkage_is_the_papers_on_any_range(rows):
    """Outcomes in [0, 1] as they are, and mapped to the paper's [-1, 1]: twice the advantage."""
    free = [{**row, "penalty": 0.0} for row in rows]
    mapped = [{**row, "score": 2 * row["score"] - 1, "prior": 2 * row["prior"] - 1} for row in free]
    advantage = compute_credit("shrinkage", as_batch(free), prior="given").advantage
    other = compute_credit("shrinkage", as_batch(mapped), prior="given", low=-1.0).advantage
    np.testing.assert_allclose(other, 2 * advantage, atol=1e-9)


def test_shrinkage_remembers_a_task():
    state = {}
    for outcomes, expected, known in (
        ([1, 0, 0, 0], 0.25, 0.0),
        ([1, 1, 1, 1], 0.25 * 0.25 + 1 * 0.75, 1.0),
    ):
        rows = [
            {"group": "g", "trajectory": i, "step": 0, "reward": o, "penalty": 0.0, "task": 3.0}
            for i, o in enumerate(outcomes)
        ]
        credit = compute_credit("shrinkage", as_batch(rows), state=state, decay=0.25)
        held = {3.0: state["3"]} if state else {}
        assert_same_credit(credit.advantage, naive.shrinkage(rows, prior="running", known=held.items()))
        assert credit.metrics["credit/shrinkage/share_known"] == known
        state = credit.state
        assert state == {"3": pytest.approx(expected)}


def test_shrinkage_counts_a_task_once_and_forgets_none():
    batch = table([1, 0, 0, 0], group="aabb", task=["t", "t", "t", "t"])
    credit = compute_credit("shrinkage", batch, state={"t": 1.0, "other": 0.5})
    assert credit.state == {"t": 0.5 * 1.0 + 0.5 * 0.25, "other": 0.5}
    nameless = compute_credit("shrinkage", table([1, 0], task=[None, None]), state={"t": 1.0})
    assert nameless.state == {"t": 1.0}
    assert nameless.advantage.tolist() == [0.5, -0.5]


def unparsed_first(extra, valid=(False, False, True, True)):
    """Four episodes of two steps; the loop writes 0 into the columns of a first action that was not applied."""
    first = [0 if not ok else value for ok, value in zip(valid, extra, strict=True)]
    return table(
        [0.0] * 4 + [1.0, 1.0, 0.0, 0.0],
        [*range(4)] * 2,
        valid=[*valid, True, True, True, True],
        extra={"task" if isinstance(extra[0], int) else "prior": [*first, *extra]},
    )


def test_a_task_of_which_no_action_was_applied_is_remembered():
    """The trainer's key stands on every step: all four failures count, and the prior is the average so far."""
    lost = {"group": ["g"] * 4, "trajectory": range(4), "step": [0] * 4, "reward": [0.0] * 4, "valid": [False] * 4}
    credit = compute_credit("shrinkage", StepBatch(**lost, extra={"task": ["t"] * 4}), state={"t": 0.8})
    assert credit.state == {"t": 0.4}
    assert (credit.advantage < 0).all()


def test_a_prior_on_steps_that_the_environment_refused_is_read():
    """Their actions parsed, so that the environment's columns are there, though none of these steps is valid."""
    refused = {"group": ["g"] * 2, "trajectory": [0, 1], "step": [0, 0], "reward": [1.0, 0.0], "valid": [False] * 2}
    for prior in ([0.5, 0.5], [0.5, 0.0]):
        credit = compute_credit("shrinkage", StepBatch(**refused, extra={"prior": prior}), prior="given")
        np.testing.assert_allclose(credit.advantage, [0.5, -0.5])
    credit = compute_credit("shrinkage", StepBatch(**refused, extra={"prior": [0.9, 0.0]}), prior="given")
    assert credit.advantage[1] < -0.5


def test_shrinkage_reads_the_first_step_that_was_applied():
    batch = unparsed_first([0.6] * 4)
    credit = compute_credit("shrinkage", batch, prior="given", low=0.0)
    np.testing.assert_allclose(credit.advantage, [0.4, 0.4, -0.6, -0.6] * 2)
    # What stands in the other rows does not matter, out of bounds or not.
    assert compute_credit("shrinkage", unparsed_first([0.6] * 4), prior="given", low=-2.0, high=2.0).advantage.any()
    credit = compute_credit("shrinkage", unparsed_first([7] * 4), prior="running")
    assert credit.state == {"7": 0.5}


def test_without_an_applied_step_there_is_no_prior():
    batch = table([1.0, 0.0], valid=[False] * 2, prior=[0, 0])
    np.testing.assert_allclose(compute_credit("shrinkage", batch, prior="given").advantage, [0.5, -0.5])


def test_shrinkage_refuses_two_tasks_in_a_group():
    with pytest.raises(ConfigError, match=r"expected one task in a group, got 't1' and 't2' in group 'g'"):
        compute_credit("shrinkage", table([1, 0], task=["t1", "t2"]))


def test_shrinkage_asks_for_the_range_of_outcomes():
    with pytest.raises(ConfigError, match=r"shrinkage: expected outcomes in \[low, high\] = \[0, 1\], got -1 for .* 1"):
        compute_credit("shrinkage", table([1, -1], task=["t", "t"]))
    with pytest.raises(ConfigError, match=r"shrinkage\.low: expected from -1e18 to below high=1, got 2"):
        compute_credit("shrinkage", table([1], task=["t"]), low=2.0)
    with pytest.raises(ConfigError, match=r"'shrinkage' needs the column 'extra\.task'"):
        compute_credit("shrinkage", table([1]))
    with pytest.raises(ConfigError, match=r"'shrinkage' needs the column 'extra\.prior'"):
        compute_credit("shrinkage", table([1], task=["t"]), prior="given")


def test_unlikeliness_by_hand():
    """Mean log-probabilities -1, -0.5, -0.5, -4: ranks 1, 2.5, 2.5, 0 of 4."""
    batch = table([1, 1, 1, 1], tokens=[2, 2, 4, 1], log_prob=[-2, -1, -2, -4])
    credit = compute_credit("unlikeliness", batch, beta=0.4)
    earned = 1 - 0.4 * np.array([1, 2.5, 2.5, 0]) / 4
    np.testing.assert_allclose(credit.advantage, (earned - earned.mean()) / (earned.std(ddof=1) + 1e-6), rtol=1e-12)
    assert credit.metrics["credit/unlikeliness/factor/mean"] == pytest.approx(earned.mean())


def test_rounding_makes_no_rollout_likelier_than_another():
    batch = table([1, 1, 1], tokens=[3, 3, 1], log_prob=[-0.3, -0.1 - 0.2, -0.1])
    assert len({-0.3 / 3, (-0.1 - 0.2) / 3, -0.1}) > 1
    assert compute_credit("unlikeliness", batch).advantage.tolist() == [0, 0, 0]


def test_a_log_probability_may_exceed_zero_by_rounding():
    batches = (table([1, 0], tokens=[1, 1], entropy=[0.1, 0.2], log_prob=[value, -0.5]) for value in (1e-12, 0.0))
    in_range, other = (compute_credit("dynamo_modulation", batch).advantage.tolist() for batch in batches)
    assert in_range == other
    with pytest.raises(ConfigError, match=r"log_prob: expected a finite number <= .* got 0.1"):
        compute_credit("dynamo_modulation", table([1, 0], tokens=[1, 1], entropy=[0.1, 0.2], log_prob=[0.1, -0.5]))


def test_dynamo_modulation_by_hand():
    """One winning episode of two steps: z = 0.7071; p = exp(-0.5), pulls p (log p + H) = -0.1820 and 0.3033."""
    batch = table([0, 1, 0], [0, 0, 1], tokens=[2, 2, 2], entropy=[0.2, 1.0, 0.6], log_prob=[-1, -1, -1])
    got = compute_credit("dynamo_modulation", batch).advantage
    calm = 0.6 + 0.4 / (1 + math.exp(50 * 0.01))  # both steps move the entropy alike, x = 1
    still = 0.6 + 0.4 / (1 + math.exp(-50 * 0.99))
    np.testing.assert_allclose(got, 0.70710578 * np.array([1.2 * calm, calm, -still]), rtol=1e-5)
