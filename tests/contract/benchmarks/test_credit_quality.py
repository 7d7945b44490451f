"""The exact values are those of the game, and the page has the tables that the kept results give."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import credit_quality  # noqa: E402
import exact_values  # noqa: E402
from exact_values import WON, WORDS, Game, play  # noqa: E402

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

    found = game.gradient(HORIZON, prompts=2)
    for place in np.ndindex(found.shape):
        step = np.zeros_like(logits)
        step[place] = 1e-5
        assert found[place] == pytest.approx((at(logits + step) - at(logits - step)) / 2e-5, abs=1e-8)


def test_episodes_win_and_end_as_often_as_computed(game: Game):
    won, situations, _ = play([game], np.zeros(20_000, dtype=int), HORIZON, np.random.default_rng(1))
    turns = (situations >= 0).sum(axis=1)
    assert won.mean() == pytest.approx(game.values(HORIZON)[HORIZON, 0], abs=0.015)
    assert turns.mean() == pytest.approx(game.turns(HORIZON)[HORIZON, 0], abs=0.02)


def test_many_batches_with_exact_advantages_have_the_exact_gradient(game: Game):
    world = credit_quality.World.of([game], HORIZON, prompts=2)
    batch = world.batch(4000, 4000, np.random.default_rng(2))
    assert credit_quality._cosine(world.estimate(batch, batch.exact), world.truth(batch)) > 0.995


def test_a_level_is_unrolled_with_its_shortest_way():
    table = exact_values._states("MiniGrid-DoorKey-5x5-v0", 0)
    assert len(table.moves) > 100
    assert any(None in moves for moves in table.moves.values()), "no action solves the task"
    assert all(there is None or there in table.moves for moves in table.moves.values() for there in moves)


def test_the_page_has_the_tables_of_the_kept_results():
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    for part in credit_quality.tables(json.loads(credit_quality.RESULTS.read_text())).split("\n\n"):
        assert part in page
