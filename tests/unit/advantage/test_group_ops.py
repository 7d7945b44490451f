"""Arithmetic on groups and trajectories, also where these are trees of steps."""

import math
import time
from random import Random

import numpy as np
import pytest
from estimator_cases import COLUMNS, as_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive.common import Conversations
from test_all_estimators import EXTRA, OF_RATES, VARIANTS

from verl_turnkey.advantage import ConfigError, StepBatch, compute_credit
from verl_turnkey.advantage.group_ops import (
    against_others,
    discounted_returns,
    distances,
    equal,
    group_stats,
    joint_codes,
    next_values,
    normalize,
    ordinals,
    previous_values,
    run_sums,
    running_sums,
    sort_runs,
)
from verl_turnkey.advantage.methods._gae import gae, td_errors

# --- The primitives against plain loops, and at sizes where a shortcut would break ------------------------------------
numbers = st.floats(-1e3, 1e3, allow_nan=False)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), numbers), max_size=30), st.sampled_from(["sample", "population"]))
def test_group_stats_equal_a_loop(pairs, std):
    codes = np.array([code for code, _ in pairs], dtype=np.int64)
    values = np.array([value for _, value in pairs], dtype=np.float64)
    stats = group_stats(values, codes, 6, std)
    for code in range(6):
        members = [value for c, value in pairs if c == code]
        assert stats.size[code] == len(members)
        mean = math.fsum(members) / len(members) if members else 0.0
        assert stats.mean[code] == pytest.approx(mean, abs=1e-9)
        freedom = max(len(members) - (std == "sample"), 1)
        spread = math.sqrt(math.fsum((v - mean) ** 2 for v in members) / freedom)
        assert stats.std[code] == pytest.approx(spread, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), numbers, st.integers(0, 4)), max_size=20),
    st.sampled_from(["sample", "population"]),
    st.randoms(use_true_random=True),
)
def test_weighted_stats_are_those_of_the_repeated_values(rows, std, random):
    def columns(rows):
        return [np.array([row[k] for row in rows], dtype=dtype) for k, dtype in ((1, float), (2, int), (0, int))]

    values, weights, codes = columns(rows)
    got = group_stats(values, codes, 6, std, weights)
    expected = group_stats(np.repeat(values, weights), np.repeat(codes, weights), 6, std)
    assert got.size.tolist() == expected.size.tolist()
    np.testing.assert_allclose(got.mean, expected.mean, rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(got.std, expected.std, rtol=1e-9, atol=1e-9)
    random.shuffle(rows)
    values, weights, codes = columns(rows)
    again = group_stats(values, codes, 6, std, weights)
    assert (again.mean.tolist(), again.std.tolist()) == (got.mean.tolist(), got.std.tolist())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), numbers), max_size=20))
def test_against_others_is_the_value_less_the_mean_of_the_others(pairs):
    codes = np.array([code for code, _ in pairs], dtype=np.int64)
    values = np.array([value for _, value in pairs], dtype=np.float64)
    got = against_others(values, codes, group_stats(values, codes, 4))
    for i, (code, value) in enumerate(pairs):
        others = [v for j, (c, v) in enumerate(pairs) if c == code and j != i]
        expected = value - math.fsum(others) / len(others) if others else 0.0
        assert got[i] == pytest.approx(expected, abs=1e-8)


@pytest.mark.parametrize("value", [0.1, 9.025, 8.57375, 1e-300, 1e15 + 0.3])
@pytest.mark.parametrize("n", [1, 3, 7, 100])
def test_constant_group_is_exactly_centred(value, n):
    values, codes = np.full(n, value), np.zeros(n, dtype=np.int64)
    stats = group_stats(values, codes, 1)
    assert stats.std[0] == 0
    assert not normalize(values, codes, stats, "mean", 1e-6).any()
    assert not normalize(values, codes, stats, "mean_std", 1e-6).any()


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (1.0, 1.0 + 1e-13, True),
        (1.0, 1.0 + 1e-11, False),
        (0.0, 1e-13, True),
        (0.0, 1e-11, False),
        (1e6, 1e6 + 1e-7, True),
        (1e6, 1e6 + 1e-4, False),
        (-1e6, -1e6 - 1e-7, True),
    ],
)
def test_rounding_is_relative_from_one_on(a, b, same):
    """A penalty of 1e-9 or a potential's last rise is a spread; the order of a sum is none."""
    assert equal(np.array([a]), np.array([b])).tolist() == equal(np.array([b]), np.array([a])).tolist() == [same]


def test_row_without_spread_in_its_group_is_not_divided_by_epsilon():
    stats = group_stats(np.array([2.0, 2.0]), np.array([0, 0]), 1)
    outside = normalize(np.array([1.9]), np.array([0]), stats, "mean_std", 1e-6)
    assert outside.tolist() == [0.0]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(numbers, min_size=1, max_size=8), max_size=6), st.floats(0, 1), st.randoms())
def test_discounted_returns_equal_the_recursion_bit_by_bit(rewards, gamma, random):
    rows = [(k, t, r) for k, run in enumerate(rewards) for t, r in enumerate(run)]
    random.shuffle(rows)
    trajectory, step = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 1))
    runs = sort_runs(trajectory, step)
    got = discounted_returns(np.array([row[2] for row in rows], dtype=np.float64), runs, gamma)
    for (k, t, _), value in zip(rows, got, strict=True):
        expected = 0.0
        for r in reversed(rewards[k][t:]):
            expected = r + gamma * expected
        assert value == expected


def test_long_trajectory_neither_overflows_nor_takes_quadratic_time():
    n = 20_000
    runs = sort_runs(np.zeros(n, dtype=np.int64), np.arange(n))
    started = time.thread_time()
    returns = discounted_returns(np.ones(n), runs, 0.5)
    assert time.thread_time() - started < 2
    assert returns[0] == 2.0
    assert returns[-1] == 1.0


def test_run_sums_and_joint_codes():
    trajectory = np.array([1, 0, 1, 0])
    runs = sort_runs(trajectory, np.array([1, 0, 0, 1]))
    assert runs.order.tolist() == [1, 3, 2, 0]
    assert run_sums(np.array([1.0, 2.0, 4.0, 8.0]), runs).tolist() == [10.0, 5.0]
    codes, n = joint_codes(np.array([0, 0, 1, 0]), np.array([0, 1, 0, 0]))
    assert n == 3
    assert codes[0] == codes[3]
    assert len(set(codes.tolist())) == 3
    assert joint_codes(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))[1] == 0


# --- Trajectories whose steps are a tree, as agents make them whose calls run at the same time ------------------------
FOLLOW_A_LINE = ("hae", "loo_td", "marshal", "rae", "tree")
BASE = {"group": "g", "trajectory": "t"}


def tree(seed: int, trajectory: str = "t") -> list[dict]:
    """The turns of an episode: requests that go on after a turn or after none, with one sample or more each."""
    random, rows = Random(seed), []
    for request in range(random.randint(1, 6)):
        after = random.choice([-1, *range(len(rows))])
        for _ in range(random.choice([1, 1, 2, 3])):
            own = random.choice([0.0, 0.0, 0.5, -1.0])
            rows.append({**BASE, "trajectory": trajectory, "after": after, "request": request, "own": own})
    return paid(rows, [*range(len(rows))], random.choice([0.0, 1.0, 3.0]))


def paid(rows: list[dict], steps: list[int], outcome: float) -> list[dict]:
    """The turns in another order of arrival; the last to arrive has the outcome, as the gateway writes it."""
    arrived = []
    for row, step in zip(rows, steps, strict=True):
        last = outcome if step == len(rows) - 1 else 0.0
        after = row["after"] if row["after"] < 0 else steps[row["after"]]
        number = min(steps[n] for n, other in enumerate(rows) if other["request"] == row["request"])
        arrived.append(
            {**row, "step": step, "after": after, "request": number, "reward": row["own"] + last, "outcome": last}
        )
    return arrived


def batch_of(rows: list[dict], **extra: list) -> StepBatch:
    return as_batch([{k: v for k, v in row.items() if k != "own"} | extra for row in rows])


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_equals_the_plain_recursions(seed, gamma):
    rows = tree(seed)
    batch, naive, turns = batch_of(rows), Conversations(rows), range(len(rows))
    assert distances(batch.runs).tolist() == [naive.distance(t) for t in turns]
    assert ordinals(batch.runs).tolist() == [len(naive.path(t)) - 1 for t in turns]
    np.testing.assert_allclose(batch.returns(gamma), [naive.returned(t, gamma) for t in turns], atol=1e-12)
    values = np.array([Random(seed + t).choice([0.0, 0.25, 2.0]) for t in turns])
    mean = [np.mean(values[naive.next(t)]) if naive.next(t) else -7.0 for t in turns]
    np.testing.assert_allclose(next_values(values, batch.runs, -7.0), mean, atol=1e-12)
    np.testing.assert_allclose(
        running_sums(values, batch.runs), [sum(values[naive.path(t)]) for t in turns], atol=1e-12
    )
    before = [values[naive.path(t)[-2]] if len(naive.path(t)) > 1 else -7.0 for t in turns]
    assert previous_values(values, batch.runs, -7.0).tolist() == before
    with_values = as_batch(
        [{k: v for k, v in row.items() if k != "own"} | {"value": values[t]} for t, row in enumerate(rows)]
    )
    whole = gae(with_values, td_errors(with_values, gamma), gamma, 1.0)
    np.testing.assert_allclose(whole + values, batch.returns(gamma), atol=1e-12)


def test_eight_samples_of_a_state_have_one_return_whatever_came_after_one_of_them():
    """The fifth goes on to two more turns; its siblings are as far from the end."""
    rows = [{**BASE, "after": -1, "request": 0, "own": 0.0} for _ in range(8)]
    rows += [{**BASE, "after": after, "request": after, "own": 0.0} for after in (4, 8)]
    batch = batch_of(paid(rows, [*range(10)], 1.0), anchor="s")
    returns = compute_credit("gigpo", batch, gamma=0.95).returns
    np.testing.assert_allclose(returns, [0.95**2] * 8 + [0.95, 1.0])
    alone = batch_of(paid(rows[:8], [*range(8)], 1.0), anchor="s")
    assert compute_credit("gigpo", alone, gamma=0.95).returns.tolist() == [1.0] * 8


def test_a_reward_of_a_reply_belongs_to_it_and_to_what_led_to_it():
    """The picture of docs/your-agent.md."""
    tree = {"after": [-1, -1, -1, 2, 3, 0], "request": [0, 0, 2, 3, 4, 5]}
    paid = {"reward": [0, 0, 0, 0, 0.2, 1], "outcome": [0, 0, 0, 0, 0, 1]}
    batch = StepBatch(group=["g"] * 6, trajectory=["t"] * 6, step=range(6), **tree, **paid)
    np.testing.assert_allclose(batch.returns(0.5), [0.5, 0.5, 0.3, 0.6, 1.2, 1.0])
    assert batch.score.tolist() == [1.2] * 6


def shuffled(rows: list[dict], random: Random) -> list[int]:
    """Another order of arrival: no turn before the one that it goes on after."""
    steps: dict[int, int] = {}
    while len(steps) < len(rows):
        ready = [t for t, row in enumerate(rows) if t not in steps and (row["after"] < 0 or row["after"] in steps)]
        steps[random.choice(ready)] = len(steps)
    return [steps[t] for t in range(len(rows))]


RANDOM = ("anchor", "action", "text", "value", "gold_probability", "entropy", "teacher_gap", "teacher_log_prob_mean")
RANDOM += ("potential", "turn_value", "turn_score", "log_prob")
CASES = [case for case in VARIANTS if case[1].get("baseline") != "one_per_trajectory"]  # of the step that came first
CASES += [("gigpo", {"modify": [name]}) for name in ("agent_opsd", "empg", "hcapo", "trace", "unlikeliness")]


@pytest.mark.parametrize(("name", "params"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(map(str, x)))
def test_no_credit_by_order_of_arrival(name, params):
    """Steps with other numbers in a possible order have the same credit, or the method says that it follows a line."""
    for seed in range(6):
        random, both = Random(seed), ([], [])
        for number in range(3):
            rows = tree(seed * 7 + number, f"t{number}")
            outcome = math.fsum(row["outcome"] for row in rows)
            outcome = min(1.0, outcome) if name in OF_RATES else outcome
            if name in OF_RATES:
                rows = [{**row, "own": 0.0} for row in rows]
            for row in rows:
                row |= EXTRA | {key: random.choice(COLUMNS[key]) for key in RANDOM}
                row |= {
                    "next_anchor": random.choice(["A", "B", None]),
                    "tokens": 3,
                    "success": outcome > 0,
                    "terminated": False,
                }
                row["anchor"] = f"{row['anchor']}" if row["request"] % 2 else "A"
                row.pop("parent", None)
            for steps, table in zip(([*range(len(rows))], shuffled(rows, random)), both, strict=True):
                table += paid(rows, steps, outcome)
        batches = [batch_of(table, parent="start") for table in both]
        if name in FOLLOW_A_LINE:
            if any(batch.runs.tree is not None for batch in batches):
                with pytest.raises(ConfigError, match=r"one conversation per episode, but the .+'s calls ran"):
                    compute_credit(name, batches[0], **params)
            continue
        first, second = (compute_credit(name, batch, **params) for batch in batches)
        np.testing.assert_allclose(first.advantage, second.advantage, atol=1e-9)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"after": [-1, 1]}, "after: row 1, trajectory 't', step 1: expected -1 or an earlier step .*, got 1"),
        ({"after": [-1, 7]}, "expected -1 or an earlier step of its trajectory, got 7"),
        ({"after": [-1, 0], "request": [0, 0]}, "request: row 1, .* goes on after another step"),
    ],
)
def test_what_is_no_tree_is_refused(columns, words):
    with pytest.raises(ValueError, match=words):
        StepBatch(group=["g"] * 2, trajectory=["t"] * 2, step=[0, 1], reward=[0.0, 0.0], **columns)
