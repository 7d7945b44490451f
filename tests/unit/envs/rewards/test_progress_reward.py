"""VSRM and ProgRM: the check values of the methods, slow twins, and properties."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_turnkey.envs.rewards import RewardError, RewardStep, compose
from verl_turnkey.envs.rewards.progress import differences, recipe_progress, vsrm

ESTIMATES = st.lists(st.sampled_from([0.0, 0.2, 0.4, 0.8, 1.0]), min_size=2, max_size=12)


def test_vsrm_by_hand():
    assert vsrm([0.2, 0.2, 0.2, 0.8]) == pytest.approx([0.294, 0.42, 0.6])
    assert vsrm([0.8, 0.8, 0.2]) == pytest.approx([-0.42, -0.6])
    assert vsrm([0.5] * 5) == [0.0] * 4
    # four steps ahead still count, five do not
    assert vsrm([0.0] * 6 + [1.0]) == pytest.approx([0.0, 0.7**4, 0.7**3, 0.7**2, 0.7, 1.0])
    # a change below the tolerance is none
    assert vsrm([0.2, 0.2 + 1e-6, 0.8]) == pytest.approx([0.42, 0.6], abs=1e-5)
    assert vsrm([0.5]) == []


def slow_vsrm(accuracies, decay, lookahead):
    rewards = []
    for j in range(len(accuracies) - 1):
        reward = 0.0
        for m in range(lookahead + 1):
            if j + m + 1 >= len(accuracies):
                break
            change = accuracies[j + m + 1] - accuracies[j + m]
            if abs(change) >= 1e-5:
                sign = 1 if change > 0 else -1
                reward = sign * abs(change) * decay**m
                break
        rewards.append(reward)
    return rewards


@settings(deadline=None)
@given(ESTIMATES, st.floats(0, 1), st.integers(0, 5))
def test_vsrm_as_in_slow_loops(accuracies, decay, lookahead):
    assert vsrm(accuracies, decay=decay, lookahead=lookahead) == slow_vsrm(accuracies, decay, lookahead)


@settings(deadline=None)
@given(ESTIMATES)
def test_differences_add_up(estimates):
    rewards = differences(estimates)
    assert len(rewards) == len(estimates) - 1
    assert sum(rewards) == pytest.approx(estimates[-1] - estimates[0], abs=1e-12)
    assert vsrm(estimates, lookahead=0) == pytest.approx([r if abs(r) >= 1e-5 else 0 for r in rewards])


def test_progress_along_a_recipe():
    assert recipe_progress(["a", "x", "c", "b", "c"], "abc") == pytest.approx([0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1])
    assert recipe_progress([], "ab") == [0.0]
    with pytest.raises(ValueError, match="at least one key step"):
        recipe_progress(["a"], [])


@settings(deadline=None, max_examples=60)
@given(st.text("abc", max_size=6), st.text("abc", min_size=1, max_size=5))
def test_progress_is_the_longest_common_subsequence(done, recipe):
    def common(a, b):
        if not a or not b:
            return 0
        if a[-1] == b[-1]:
            return common(a[:-1], b[:-1]) + 1
        return max(common(a[:-1], b), common(a, b[:-1]))

    expected = [common(done[:k], recipe) / len(recipe) for k in range(len(done) + 1)]
    assert recipe_progress(done, recipe) == pytest.approx(expected)


def test_the_component():
    estimates = [0.2, 0.2, 0.2, 0.8]
    steps = [RewardStep("", "a", extra={"p": before}, next_extra={"p": after}) for before, after in pairwise(estimates)]
    assert compose([{"name": "progress", "key": "p"}])(steps).rewards == pytest.approx([0.0, 0.0, 0.6])
    entry = {"name": "progress", "key": "p", "kind": "vsrm"}
    assert compose([entry])(steps).rewards == pytest.approx([0.294, 0.42, 0.6])
    assert compose([{**entry, "lookahead": 1, "decay": 0.5}])(steps).rewards == pytest.approx([0, 0.3, 0.6])


def walk(estimates, **last):
    steps = [RewardStep("", "a", extra={"progress": a}, next_extra={"progress": b}) for a, b in pairwise(estimates)]
    return [*steps[:-1], RewardStep(**{**vars(steps[-1]), **last})]


def pav(estimates, last=None, **options):
    return compose([{"name": "pav", **options}])(walk(estimates, **(last or {}))).rewards


def test_pav_by_hand():
    [gain] = pav([0.2, 0.5], alpha=1, own=False)
    assert gain == pytest.approx(0.3471)
    assert pav([0.2, 0.5], alpha=5) == pytest.approx([2.2355])
    assert pav([0.2, 0.5], alpha=0) == [0.5]
    assert pav([0.2, 0.5], k=1, alpha=2) == pytest.approx([0.5 + 2 * 0.3])


@settings(deadline=None, max_examples=40)
@given(ESTIMATES, st.integers(1, 5), st.floats(0, 6), st.booleans(), st.booleans())
def test_pav_as_in_slow_loops(estimates, k, alpha, terminated, success):
    last = {"terminated": terminated, "success": success}
    known = [*estimates[:-1], (1.0 if success else 0.0) if terminated else estimates[-1]]
    expected = []
    for before, after in pairwise(known):
        some = [1 - (1 - q) ** k for q in (before, after)]
        expected.append(after + alpha * (some[1] - some[0]))
    assert pav(estimates, last, k=k, alpha=alpha) == pytest.approx(expected)


def test_pav_with_a_prover_of_its_own():
    steps = [
        RewardStep("", "a", extra={"q": 0.1, "mu": 0.4}, next_extra={"q": 0.2, "mu": 0.7}),
        RewardStep("", "b", extra={"q": 0.2, "mu": 0.7}, success=True, terminated=True),
    ]
    entry = {"name": "pav", "key": "q", "prover": "given", "prover_key": "mu", "alpha": 2}
    assert compose([entry])(steps).rewards == pytest.approx([0.2 + 2 * 0.3, 1.0 + 2 * 0.3])
    with pytest.raises(RewardError, match=r"step 0: .*\['prover_value'\], got None"):
        compose([{**entry, "prover_key": "prover_value"}])(steps)
    with pytest.raises(RewardError, match=r"of state 1: expected a probability, got 1\.5"):
        pav([0.1, 1.5])
