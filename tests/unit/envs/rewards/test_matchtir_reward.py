"""MatchTIR: similarity, both kinds of matching, turns and the final answer."""

import itertools
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.envs import MissingPackageError
from verl_turnkey.envs.rewards import RewardError, RewardStep, compose
from verl_turnkey.envs.rewards.matchtir import (
    ToolCall,
    answer_f1,
    greedy_rewards,
    hard_rewards,
    similarities,
    similarity,
    soft_rewards,
    turn_rewards,
)

SEARCH = ToolCall("search", {"query": "Paris", "limit": 3})


@pytest.mark.parametrize(
    ("predicted", "expected"),
    [
        (SEARCH, 1.0),
        (ToolCall("SEARCH", {"limit": 3, "query": "Paris"}), 1.0),
        (ToolCall("find", {"query": "Paris", "limit": 3}), 0.0),
        (ToolCall("search"), 1 / 4),
        (ToolCall("search", {"query": "Rome", "limit": 3}), 3 / 4),
        (ToolCall("search", {"query": "Paris"}), (1 + 1 / 2 + 1) / 4),
        (ToolCall("search", {"query": "Paris", "limit": 3, "page": 1}), (1 + 2 / 3 + 2) / 4),
        (ToolCall("search", {"page": 1}), 1 / 4),
    ],
)
def test_similarity(predicted, expected):
    assert similarity(predicted, SEARCH) == pytest.approx(expected)


def test_a_call_without_arguments():
    assert similarity(ToolCall("now"), ToolCall("now")) == 1.0
    assert similarity(ToolCall("now", {"zone": 1}), ToolCall("now")) == 0.5


@st.composite
def matrices(draw):
    p, g = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    numbers = st.sampled_from([0.0, 0.25, 0.5, 0.6, 0.75, 1.0])
    return np.array(draw(st.lists(numbers, min_size=p * g, max_size=p * g))).reshape(p, g)


@settings(deadline=None, max_examples=80)
@given(matrices())
def test_no_other_assignment_is_better(scores):
    """All one-to-one assignments, counted through."""
    p, g = scores.shape
    small, large = (scores, g) if p <= g else (scores.T, p)
    best = max(
        sum(small[i, j] for i, j in enumerate(places)) for places in itertools.permutations(range(large), min(p, g))
    )
    rewards = hard_rewards(scores)
    assert sum(rewards) == pytest.approx(best)
    assert all(reward in (0.0, *row) for reward, row in zip(rewards, scores, strict=True))
    punished = hard_rewards(scores, unmatched=-0.5)
    assert punished == [reward if reward > 0 else -0.5 for reward in rewards]


@settings(deadline=None, max_examples=30)
@given(matrices(), st.sampled_from([0.1, 0.3, 1.0]))
def test_soft_as_in_plain_sinkhorn(scores, regularization):
    """The textbook iteration, and the marginals that the plan must have."""
    p, g = scores.shape
    kernel = np.exp(scores / regularization)
    u, v = np.ones(p), np.ones(g)
    for _ in range(1500):
        u = 1 / p / (kernel @ v)
        v = 1 / g / (kernel.T @ u)
    plan = u[:, None] * kernel * v
    assert plan.sum(0) == pytest.approx(np.full(g, 1 / g), abs=1e-6)
    assert plan.sum(1) == pytest.approx(np.full(p, 1 / p), abs=1e-4)
    rewards = soft_rewards(scores, regularization)
    assert rewards == pytest.approx((plan * scores).sum(1), abs=1e-4)
    assert all(-1e-12 <= reward <= 1 / p + 1e-6 for reward in rewards)


def test_soft_by_hand():
    assert soft_rewards(np.ones((2, 2))) == pytest.approx([0.5, 0.5])
    assert soft_rewards(np.ones((1, 3))) == pytest.approx([1.0])
    # two of each, one right partner each: weight 1 / (1 + e^-10) of a half
    assert soft_rewards(np.eye(2)) == pytest.approx([0.5 / (1 + np.exp(-10))] * 2)
    assert soft_rewards(np.eye(2), 1e-4) == pytest.approx([0.5, 0.5]), "no overflow"


def test_nothing_to_match():
    assert hard_rewards(similarities([], [SEARCH])) == []
    assert hard_rewards(similarities([SEARCH], []), unmatched=-0.5) == [-0.5]
    assert soft_rewards(similarities([], [SEARCH])) == []
    assert soft_rewards(similarities([SEARCH], [])) == [0.0]


def test_turns():
    other = ToolCall("other")
    turns = [[SEARCH, other], [], [SEARCH], [ToolCall("search", {"query": "Rome", "limit": 3})]]
    gold = [SEARCH, ToolCall("search", {"query": "Rome", "limit": 3})]
    assert turn_rewards(turns, gold) == pytest.approx([0.5, 0.0, 0.0, 1.0])
    assert turn_rewards(turns, gold, unmatched=-0.5) == pytest.approx([0.25, 0.0, -0.5, 1.0])
    soft = turn_rewards(turns, gold, variant="soft")
    flat = soft_rewards(similarities([c for turn in turns for c in turn], gold))
    assert soft == pytest.approx([(flat[0] + flat[1]) / 2, 0.0, flat[2], flat[3]])


def test_answers():
    assert answer_f1("The Eiffel-Tower, Paris!", "paris") == pytest.approx(2 * (1 / 4) / (1 / 4 + 1))
    assert answer_f1("paris paris", "Paris") == 1.0, "words as a set"
    assert answer_f1("rome", "paris") == answer_f1("", "paris") == answer_f1("...", "") == 0.0


def step(**next_extra) -> RewardStep:
    return RewardStep("", "x", next_extra=next_extra)


def test_the_component():
    task = {
        "gold_tool_calls": [{"name": "search", "arguments": '{"query": "Paris", "limit": 3}'}],
        "gold_answer": "a b",
    }
    never = {"tool_calls": [{"name": "search", "arguments": {"query": "Paris", "limit": 3}}]}
    steps = [
        RewardStep("", "x", extra=task, next_extra={"tool_calls": [{"name": "search", "arguments": "no json"}]}),
        RewardStep("", None, valid=False, extra=never, next_extra=never),
        step(tool_calls=[{"name": "search", "arguments": {"limit": 3, "query": "Paris"}}]),
        step(answer="a"),
    ]
    assert compose([{"name": "matchtir"}])(steps).rewards == pytest.approx([0.0, 0.0, 1.0, 2 / 3])
    entry = {"name": "matchtir", "unmatched": -0.5}
    assert compose([entry])(steps).rewards == pytest.approx([-0.5, 0.0, 1.0, 2 / 3])
    soft = compose([{"name": "matchtir", "variant": "soft"}])(steps).rewards
    assert soft == pytest.approx([0.125, 0.0, 0.5, 2 / 3])
    with pytest.raises(RewardError, match=r"reset to give info\['extra'\]\['gold_tool_calls'\]"):
        compose([entry])(steps[1:])
    with pytest.raises(RewardError, match=r"a dict with name and arguments \(or parameters\), got 'search'"):
        compose([entry])([steps[0], step(tool_calls=["search"])])


@pytest.mark.parametrize("key", ["arguments", "parameters"])
@pytest.mark.parametrize("as_text", [False, True])
def test_the_papers_gold_calls_have_parameters(key, as_text):
    values = {"query": "Paris", "limit": 3}
    gold = {"name": "search", key: json.dumps(values) if as_text else values}
    steps = [
        RewardStep(
            "",
            "x",
            extra={"gold_tool_calls": [gold]},
            next_extra={"tool_calls": [{"name": "search", "arguments": values}]},
        )
    ]
    assert compose([{"name": "matchtir"}])(steps).rewards == [1.0]


def test_a_turn_with_a_call_and_an_answer_is_paid_for_the_answer():
    """Its call takes no part in the matching: the gold call is left for the turn before, as in the released code."""
    right, close = ({"name": "search", "arguments": {"query": query}} for query in ("Paris", "Rome"))
    task = {"gold_tool_calls": [right], "gold_answer": "a b"}
    first = RewardStep("", "x", extra=task, next_extra={"tool_calls": [close]})
    both = step(tool_calls=[right], answer="a")
    for entry, expected in (
        ({"name": "matchtir"}, [2 / 3, 2 / 3]),
        ({"name": "matchtir", "variant": "soft"}, [2 / 3, 2 / 3]),
    ):
        assert compose([entry])([first, both]).rewards == pytest.approx(expected)
    task.pop("gold_answer")
    assert compose([{"name": "matchtir"}])([first, both]).rewards == [0.0, 1.0], "nothing to compare the answer with"


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingPackageError, match=r'pip install "verl-turnkey\[matchtir\]"'):
        compose([{"name": "matchtir"}])
    assert compose([{"name": "matchtir", "variant": "soft"}]).labels == ("matchtir",)


def test_the_released_codes_matching_takes_the_best_pair_first():
    """The two differ where the best pair keeps two others apart."""
    scores = np.array([[0.9, 0.8], [0.8, 0.1]])
    assert hard_rewards(scores) == [0.8, 0.8]
    assert greedy_rewards(scores) == [0.9, 0.1]
    assert greedy_rewards(np.array([[0.5, 0.0], [0.5, 0.0]]), -0.5) == [0.5, -0.5], "the earlier call; 0 is no pair"
    assert greedy_rewards(np.zeros((2, 0))) == [0.0, 0.0]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 4), st.integers(0, 4), st.randoms(use_true_random=False))
def test_greedy_matching_as_in_slow_loops(p, g, random):
    scores = np.array([random.choice([0.0, 0.25, 0.5, 1.0]) for _ in range(p * g)]).reshape(p, g)
    left, expected = {(i, j) for i in range(p) for j in range(g) if scores[i, j] > 0}, [0.0] * p
    while left:
        i, j = min(left, key=lambda pair: (-scores[pair], pair))
        expected[i] = scores[i, j]
        left = {(a, b) for a, b in left if a != i and b != j}
    assert greedy_rewards(scores) == expected
    assert sum(expected) <= sum(hard_rewards(scores)) + 1e-12


def test_matching_is_an_option():
    calls = [{"name": "f", "arguments": arguments} for arguments in ({"a": 1, "b": 1}, {"a": 1})]
    gold = [{"name": "f", "arguments": arguments} for arguments in ({"a": 1, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 2})]
    step = RewardStep("", "x", extra={"gold_tool_calls": gold}, next_extra={"tool_calls": calls})
    scores = similarities(
        *([ToolCall(call["name"], call["arguments"]) for call in side] for side in (calls, gold)),
    )
    for matching, rewards in (("optimal", hard_rewards(scores)), ("greedy", greedy_rewards(scores))):
        composed = compose([{"name": "matchtir", "matching": matching}])([step]).rewards
        assert composed == pytest.approx([sum(rewards) / 2])
