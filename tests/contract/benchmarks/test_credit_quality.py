"""The exact values are those of the game, and the page has the tables that the kept results give."""

from __future__ import annotations

import json
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import credit_quality  # noqa: E402
import exact_values  # noqa: E402
from credit_quality import Branching  # noqa: E402
from exact_values import WON, WORDS, Game, play  # noqa: E402
from training import HISTORY  # noqa: E402

from verl_turnkey.advantage import StepBatch, compute_credit  # noqa: E402
from verl_turnkey.plugins.rollout.strategies.builtin import EntropyBranch, Tree  # noqa: E402

HORIZON = 3


@pytest.fixture(scope="module")
def game() -> Game:
    """Two situations with prompts of their own and one that shares its prompt with the start."""
    draw = np.random.default_rng(0)
    policy = draw.dirichlet(np.ones(len(WORDS)), size=2)
    following = np.array([[1, 2, 0, 1, 2, 0], [WON, 2, 1, 0, 0, 1], [0, 1, 2, WON, 1, 2]])
    return Game(["a", "b", "c"], ["", "", ""], np.array([0, 1, 0]), policy[[0, 1, 0]], following)


def _success(game: Game, policy: np.ndarray, situation: int = 0, turns: int = HORIZON) -> float:
    """The sum over all sequences of actions."""
    total = 0.0
    for actions in product(range(len(WORDS)), repeat=turns):
        chance, here = 1.0, situation
        for place, action in enumerate(actions):
            chance *= policy[game.prompt[here], action]
            here = game.following[here, action]
            if here == WON:  # counted once, however the sequence goes on
                total += chance if not any(actions[place + 1 :]) else 0.0
                break
    return total


def test_values_are_the_sums_over_all_sequences_of_actions(game: Game):
    values = game.values(HORIZON)
    policy = game.policy[:2]
    for turns, situation in product(range(HORIZON + 1), range(3)):
        assert values[turns, situation] == pytest.approx(_success(game, policy, situation, turns), abs=1e-12)


def test_the_gradient_is_that_of_the_success(game: Game):
    logits = np.log(game.policy[:2])

    def at(moved: np.ndarray) -> float:
        odds = np.exp(moved)
        return _success(game, odds / odds.sum(axis=1, keepdims=True))

    gradient = game.gradient(HORIZON, prompts=2)
    for place in np.ndindex(gradient.shape):
        step = np.zeros_like(logits)
        step[place] = 1e-5
        assert gradient[place] == pytest.approx((at(logits + step) - at(logits - step)) / 2e-5, abs=1e-8)


def test_episodes_win_and_end_as_often_as_computed(game: Game):
    won, situations, _ = play([game], np.zeros(20_000, dtype=int), HORIZON, np.random.default_rng(1))
    turns = (situations >= 0).sum(axis=1)
    assert won.mean() == pytest.approx(game.values(HORIZON)[HORIZON, 0], abs=0.015)
    assert turns.mean() == pytest.approx(game.turns(HORIZON)[HORIZON, 0], abs=0.02)


def test_many_batches_with_exact_advantages_have_the_exact_gradient(game: Game):
    world = credit_quality.World.of([game], HORIZON, prompts=2)
    batch = world.batch(4000, 4000, np.random.default_rng(2))
    assert credit_quality.cosine(world.estimate(batch, batch.exact), world.truth(batch)) > 0.995


def _two(first: list[float], second: list[float], horizon: int) -> credit_quality.World:
    """Every action leads from the first situation to the second, where action 0 wins and the others stay."""
    following = np.array([[1] * len(WORDS), [WON, *[1] * (len(WORDS) - 1)]])
    game = Game(["a", "b"], ["", ""], np.array([0, 1]), np.array([first, second]), following)
    return credit_quality.World.of([game], horizon, prompts=2)


def test_the_credit_of_a_fork_is_the_true_advantage_times_the_scale_of_two_leaves():
    """Two leaves, one fork before the only step that matters: 1 and 0 are 2 * 0.5 / sqrt(0.5) apart from their mean.

    So a step that wins has sqrt(2) where the other leaf loses, and 0 else: on average sqrt(2) (1 - p), and one that
    loses -sqrt(2) p. True are 1 - p and -p.
    """
    p = 0.3
    world = _two([1 / 6] * 6, [p, *[0.7 / 5] * 5], 2)
    way, draw = Branching(Tree(first=1, depth=1), 1, "siblings"), np.random.default_rng(3)
    credits: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(4000):
        batch = world.forked(way, 1, draw)
        advantage = compute_credit("tree", batch.steps, rule=way.rule).advantage
        assert batch.steps.step.tolist() == [0, 1, 1]
        assert advantage[0] == 0
        assert batch.exact[0] == pytest.approx(0, abs=1e-12)
        won = batch.steps.success[1:]
        unequal = won[0] != won[1]
        assert advantage[1:] == pytest.approx(np.where(won, 1, -1) * unequal * 2**0.5, abs=1e-5)
        assert batch.exact[1:] == pytest.approx(np.where(won, 1 - p, -p), abs=1e-12)
        for success, value in zip(won, advantage[1:], strict=True):
            credits[bool(success)].append(value)
    assert np.mean(credits[True]) == pytest.approx(2**0.5 * (1 - p), abs=0.05)
    assert np.mean(credits[False]) == pytest.approx(-(2**0.5) * p, abs=0.05)


def _chain(n: int = 1) -> credit_quality.World:
    """``n`` games: action 0 leads on and wins after the third time, action 1 leads back, the others stay."""
    policy = np.tile([0.5, 0.2, *[0.3 / 4] * 4], (3, 1))
    following = np.array([[1, 0, *[0] * 4], [2, 0, *[1] * 4], [WON, 1, *[2] * 4]])
    game = Game(["a", "b", "c"], ["", "", ""], np.arange(3), policy, following)
    return credit_quality.World.of([game] * n, 6, prompts=3)


def test_methods_get_the_state_after_each_step_and_after_the_last_one():
    world = _chain()
    batch = world.batch(8, 8, np.random.default_rng(5))
    steps = batch.steps
    key = np.array(world.games[0].key)
    ahead = steps.extra["next_anchor"]
    last = steps.terminated | steps.truncated
    assert ahead[~last].tolist() == key[batch.situation[1:][~last[:-1]]].tolist()
    assert set(ahead[steps.terminated]) == {credit_quality.SOLVED}
    cut = batch.situation[steps.truncated], batch.action[steps.truncated]
    assert len(cut[0]), "no episode was truncated"
    assert ahead[steps.truncated].tolist() == key[world.games[0].following[cut]].tolist()
    without = StepBatch(
        **{name: getattr(steps, name) for name in ("group", "trajectory", "step", "reward", "terminated", "success")},
        anchor=[key[s] for s in batch.situation],
        action=[WORDS[a] for a in batch.action],
    )
    for method in ("graph", "salt"):
        advantage = credit_quality.credit(method, batch.steps)
        assert not np.allclose(advantage, compute_credit(method, without).advantage), method


def test_hgpo_compares_as_many_past_states_as_the_prompt_shows():
    world = _chain()
    batch = world.batch(8, 8, np.random.default_rng(6))
    advantage = credit_quality.credit("hgpo", batch.steps)
    expected, longer = (compute_credit("hgpo", batch.steps, history=k).advantage for k in (HISTORY, HISTORY + 1))
    assert advantage.tolist() == expected.tolist()
    assert not np.allclose(expected, longer)


def test_there_may_be_more_groups_than_games():
    world = _chain(2)
    several = world.batch(2, 10, np.random.default_rng(7))
    forked = world.forked(Branching(Tree(every=1), 2, "siblings"), 5, np.random.default_rng(7))
    for batch in (several, forked):
        assert batch.steps.n_groups == 5
        assert all(len(set(batch.game[batch.steps.group == group])) == 1 for group in range(5))
    for seed in range(10):
        assert set(world.batch(4, 8, np.random.default_rng(seed)).game) == {0, 1}, "one twice though there are two"


def test_the_price_of_continuations_is_their_turns():
    world = _chain()
    batch = world.batch(8, 8000, np.random.default_rng(9))
    assert len(batch.exact) / 8000 == pytest.approx(world.length, rel=0.01)
    assert credit_quality._with_continuations(world, batch) / len(batch.exact) == pytest.approx(world.price, rel=0.01)


def test_a_row_has_as_many_turns_as_independent_episodes_or_says_that_it_has_not():
    measured = credit_quality.measure(_chain(2), 2, 20, 0)["methods"]
    assert measured.pop(credit_quality.VINE_ALL)["turns"] > 2
    assert all(measured[name]["turns"] == 1 for name in (*credit_quality.METHODS, credit_quality.EXACT))
    assert len(measured) == len(credit_quality.METHODS) + 6
    for name, numbers in measured.items():
        assert numbers["turns"] == pytest.approx(1, abs=credit_quality.TOLERANCE), name
        assert "turns" not in credit_quality._cell(name, numbers)
        assert credit_quality._cell(name, {**numbers, "turns": 0.9}).endswith(" (0.90 of the turns)")


def test_half_of_the_branches_begin_where_the_strategy_says():
    world = _two([1 / 6] * 6, [0, *[1 / 5] * 5], 4)
    batch = world.forked(Branching(Tree(first=1, every=2, depth=2), 1, "siblings"), 1, np.random.default_rng(10))
    assert sorted(credit_quality._begins(batch)) == [1, 3, 3]


@pytest.mark.parametrize(("roots", "first"), [("shared", {"start": 2}), ("own", {"0": 1, "1": 1})])
def test_each_turn_of_a_tree_is_there_once_with_the_path_that_it_goes_on_from(roots: str, first: dict[str, int]):
    world = _two([1 / 6] * 6, [0, *[1 / 5] * 5], 3)
    batch = world.forked(Branching(Tree(every=1, roots=roots), 2, "siblings"), 1, np.random.default_rng(4))
    of_first = {"0.0.1": 2, "0.0.2": 2, "0.1.2": 2}
    of_second = {"1.0.1": 2, "1.0.2": 2, "1.1.2": 2}
    assert Counter(batch.steps.extra["parent"].tolist()) == {**first, **of_first, **of_second}
    assert batch.steps.n_trajectories == 8


@pytest.mark.parametrize(("second", "forks"), [([0.5, 0.5, 0, 0, 0, 0], 1), ([1, 0, 0, 0, 0, 0], 0)])
def test_forks_where_a_word_was_less_likely_than_the_first_one(second: list[float], forks: int):
    """One of two rollouts may fork, before the turn that it has written; the branch writes another one."""
    world = _two([0.7, 0, 0, 0, 0, 0.3], second, 2)
    way = Branching(EntropyBranch(trajectories=3), 2, "arpo")
    seen = set()
    for seed in range(50):
        batch = world.forked(way, 1, np.random.default_rng(seed))
        sure = batch.action[batch.left == 2] == 0  # else the first word was less likely than any second one
        seen.add(bool(sure.any()))
        assert batch.steps.n_trajectories == 2 + (forks if sure.any() else 0)
        begun = batch.steps.extra["parent"][2 * 2 :].tolist()
        assert begun == ([f"{int(np.argmax(sure))}.0.1"] if forks and sure.any() else [])
    assert seen == {True, False}


def test_a_level_is_unrolled_with_its_shortest_way():
    table = exact_values.states("MiniGrid-DoorKey-5x5-v0", 0)
    assert len(table.moves) > 100
    assert any(None in moves for moves in table.moves.values()), "no action solves the task"
    assert all(there is None or there in table.moves for moves in table.moves.values() for there in moves)


def test_only_seeds_that_start_differently_are_taken():
    level = "MiniGrid-DoorKey-5x5-v0"
    seeds = exact_values.different(level, range(50_000, 50_020))
    keys = []
    for seed in range(50_000, 50_020):
        _, info = exact_values.make("turnkey/MiniGrid-v0", {"level": level}).reset(seed=seed)
        keys.append(info["state_key"])
    assert len(set(keys)) < 20, "there is nothing to leave out"
    assert seeds == [50_000 + k for k, key in enumerate(keys) if key not in keys[:k]]


def test_the_page_has_the_tables_of_the_kept_results():
    page = (ROOT / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
    for part in credit_quality.tables(json.loads(credit_quality.RESULTS.read_text())).split("\n\n"):
        assert part in page
