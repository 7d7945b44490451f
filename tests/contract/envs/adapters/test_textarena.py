"""TextArena's games for one player."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from verl_turnkey.envs import EnvironmentKwargsError, EpisodeOverError, UnknownEnvironmentError, make
from verl_turnkey.envs.adapters.textarena import GAMES, TextArenaText
from verl_turnkey.envs.errors import MissingPackageError

# One id of each family that needs nothing but the package, with actions that it understands.
ACTIONS = {
    "Countdown-v0": ["0 1 +", "1 2 *", "0 2 -"],
    "FrozenLake-v0-random": ["up", "down", "left", "right"],
    "GuessTheNumber-v0": [str(number) for number in range(1, 21)],
    "Mastermind-v0": ["1 2 3 4", "2 3 4 5", "6 5 4 3"],
    "Minesweeper-v0-small": [f"{row} {column}" for row in range(5) for column in range(5)],
    "Secretary-v0": ["continue", "continue", "accept"],
    "Sokoban-v0": ["up", "down", "left", "right"],
    "ThreeCardMonte-v0": ["0", "1", "2"],
    "TowerOfHanoi-v0": ["A B", "A C", "B C", "C A", "C B", "B A"],
}
HANOI = ["A C", "A B", "C B", "A C", "B A", "B C", "A C"]


def play(env: TextArenaText, seed: int, actions: list[str], steps: int = 15) -> list:
    choices = random.Random(seed)
    seen: list = [env.reset(seed=seed)]
    for _ in range(steps):
        seen.append(env.step(choices.choice(actions)))
        if seen[-1][2] or seen[-1][3]:
            break
    return seen


@pytest.mark.parametrize(
    ("game", "reason"),
    [
        *(("Bandit-v0", "it pays"), ("Bandit-v0-hard", "it pays"), ("FifteenPuzzle-v0", "half of its boards")),
        *(("Klondike-v0", "its source"), ("BabyAiText-v0", "it calls"), ("2048-v0-3x3", "a high score")),
        *(("UltimateTexasHoldem-v0", "it is won after a thousand rounds"), ("Blackjack-v0", "it pays the share")),
        *(("Cryptarithm-v0", "seven letters"), ("LightsOut-v0", "it may begin"), ("PegJump-v0", "four of its jumps")),
        *(("Set-v0", "it pays the number"), ("Slitherlink-v0", "all numbers"), ("TwentyQuestions-v0", "a list of")),
    ],
)
def test_games_without_an_outcome_to_train_on_are_left_out(game, reason):
    assert game not in GAMES
    with pytest.raises(UnknownEnvironmentError, match=rf"'{game}' of TextArena cannot be trained on: {reason}"):
        TextArenaText(game)


@pytest.mark.parametrize("game", ACTIONS)
def test_seeds_reproduce_and_the_global_random_state_is_left_alone(game):
    actions = ACTIONS[game]
    state, state_of_numpy = random.getstate(), np.random.get_state()[1].tolist()
    first, other = (TextArenaText(game, error_allowance=100) for _ in range(2))
    expected = [play(first, seed, actions) for seed in (0, 1)]
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == state_of_numpy
    random.seed(99)
    np.random.seed(99)
    assert [play(other, seed, actions) for seed in (1, 0)] == expected[::-1]
    assert any(not step[4]["invalid"] for trace in expected for step in trace[1:])


@pytest.mark.parametrize("game", ["Minesweeper-v0-small", "Sokoban-v0"])
def test_two_games_at_once_do_not_disturb_each_other(game):
    actions = ACTIONS[game]
    alone = play(TextArenaText(game, error_allowance=100), 3, actions)
    game_env, two = (TextArenaText(game, error_allowance=100) for _ in range(2))
    choices, seen = random.Random(3), [game_env.reset(seed=3)]
    two.reset(seed=8)
    while len(seen) < len(alone):
        two.step("up")
        seen.append(game_env.step(choices.choice(actions)))
    assert seen == alone


def test_the_same_in_a_process_with_another_hash_seed():
    code = (
        "from verl_turnkey.envs.adapters.textarena import TextArenaText\n"
        "for game, action in (('Countdown-v0', '0 1 +'), ('RushHour-v0', 'A+'), ('TowerOfHanoi-v0', 'A B')):\n"
        "    env = TextArenaText(game); print(env.reset(seed=2), env.step(action))"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


def test_hanoi_is_solved():
    env = TextArenaText("TowerOfHanoi-v0")
    observation, info = env.reset(seed=0)
    assert info["task"].startswith("You are playing Tower of Hanoi with 3 disks.\nYou have to move")
    assert observation.startswith("Current Board: \nA: [3, 2, 1]")
    answers = [env.step(action) for action in HANOI]
    assert [answer[1] for answer in answers] == [0.0] * 6 + [1.0]
    assert answers[-1][2:4] == (True, False)
    assert [answer[4]["success"] for answer in answers] == [False] * 6 + [True]
    assert answers[-1][0].endswith("You solved the Tower of Hanoi puzzle.")
    assert not any(answer[4]["invalid"] for answer in answers)
    with pytest.raises(EpisodeOverError, match="call reset first"):
        env.step("A B")


@pytest.mark.parametrize("seed", range(3))
def test_a_number_is_found_by_the_hints(seed):
    env = TextArenaText("GuessTheNumber-v0")
    env.reset(seed=seed)
    low, high, won = 1, 20, False
    for _ in range(6):
        guess = (low + high) // 2
        observation, reward, terminated, _, info = env.step(f"I think it is [{guess}].")
        if terminated:
            won = info["success"] and reward == 1.0
            break
        low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)
    assert won


def test_state_key_repeats_exactly_where_the_state_does():
    env = TextArenaText("TowerOfHanoi-v0")
    keys = [env.reset(seed=0)[1]["state_key"]]
    keys += [env.step(action)[4]["state_key"] for action in ["A B", "B C", "C A"]]
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3
    secret = TextArenaText("GuessTheNumber-v0")
    start = secret.reset(seed=0)[1]["state_key"]
    assert secret.step("20")[4]["state_key"] != start


def test_an_invalid_move_is_forgiven_as_often_as_agreed():
    env = TextArenaText("TowerOfHanoi-v0", error_allowance=2)
    observation, info = env.reset(seed=0)
    keys = [info["state_key"]]
    for action in ["fly", "x" * 100_000]:
        after, reward, terminated, truncated, after_move = env.step(action)
        assert (reward, terminated, truncated) == (0.0, False, False)
        assert after_move["invalid"]
        assert after.endswith(observation)
        keys.append(after_move["state_key"])
    assert len(set(keys)) == 3  # the same board, but how many more are forgiven is part of the state
    *_, after_move = env.step("A B")
    assert not after_move["invalid"]
    assert env.step("B A")[4]["state_key"] == keys[0]  # a valid move sets the count back
    for action, key in zip(["", "\x00\u202e☃"], keys[1:], strict=True):
        _, _, terminated, truncated, after_move = env.step(action)
        assert (terminated, truncated, after_move["state_key"]) == (False, False, key)  # whatever the text was
    _, reward, terminated, truncated, after_move = env.step("B B B")
    assert (reward, terminated, truncated, after_move["success"], after_move["invalid"]) == (
        0.0,
        True,
        False,
        False,
        True,
    )


def test_the_games_own_limit_truncates_with_what_was_solved():
    partly = ["A C", "A B", "C B", "A C", *["B A", "A B"] * 20]  # the largest disk is where it belongs

    def last(**kwargs) -> tuple:
        env = TextArenaText("TowerOfHanoi-v0", **kwargs)
        env.reset(seed=0)
        for action in partly:
            answer = env.step(action)
            if answer[2] or answer[3]:
                return answer
        raise AssertionError("it never ended")

    _, reward, terminated, truncated, info = last()
    assert (terminated, truncated, info["success"]) == (False, True, False)
    assert reward == pytest.approx(1 / 3)
    assert last(reward="success")[1:4] == (0.0, False, True)
    assert last(max_steps=3)[1:4] == (0.0, False, True)


def test_options_reach_the_game():
    env = make("turnkey/TextArena-v0", {"game": "TowerOfHanoi-v0", "options": {"num_disks": 2}})
    observation, info = env.reset(seed=0)
    assert "A: [2, 1]" in observation
    assert "2 disks" in info["task"]


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"game": "Sokobn-v0"}, UnknownEnvironmentError, "did you mean 'Sokoban-v0'"),
        ({"game": 3}, UnknownEnvironmentError, "no game 3"),
        ({"game": "TowerOfHanoi-v0", "options": {"disks": 2}}, EnvironmentKwargsError, "disks"),
        ({"reward": "sparse"}, EnvironmentKwargsError, "raw, success"),
        ({"error_allowance": -1}, EnvironmentKwargsError, "whole number"),
        ({"max_steps": 0}, EnvironmentKwargsError, "positive integer"),
        ({"gme": "Sokoban-v0"}, EnvironmentKwargsError, "did you mean 'game'"),
    ],
)
def test_bad_arguments(kwargs, error, words):
    with pytest.raises(error, match=words):
        make("turnkey/TextArena-v0", kwargs)


@pytest.mark.parametrize("game", ["TicTacToe-v0", "SecretMafia-v0", "PublicGoodsGame-v0", "Chess-v0"])
def test_games_for_several_players_are_refused(game):
    assert game not in GAMES
    with pytest.raises(UnknownEnvironmentError, match="several players"):
        make("turnkey/TextArena-v0", {"game": game})


def test_missing_word_lists_are_named(monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])  # wherever this machine may have some
    monkeypatch.setattr(nltk, "download", lambda *args, **kwargs: False)
    for module in [name for name in sys.modules if name.startswith(("textarena.envs.Hangman", "nltk.corpus"))]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(MissingPackageError, match=re.escape("nltk.downloader words")):
        make("turnkey/TextArena-v0", {"game": "Hangman-v0"})


def test_training_wrappers_are_not_games():
    assert "Sokoban-v0" in GAMES
    assert not any(name.endswith(("-raw", "-train")) for name in GAMES)


def started(game: str, **kwargs: Any) -> tuple[TextArenaText, Any]:
    env = TextArenaText(game, **kwargs)
    env.reset(seed=0)
    return env, env._game


def test_places_of_vehicles_are_part_of_the_state():
    env, game = started("RushHour-v0", error_allowance=100)
    start = env._last_result.state_key
    keys = {start}
    for car in game.state.game_state["vehicles"]:
        for way in "+-":
            result = env.step(f"{car}{way}")
            if not result[4]["invalid"]:
                keys.add(result[4]["state_key"])
    assert len(keys) > 1


@pytest.mark.parametrize("game", ["Countdown-v0", "ThreeCardMonte-v0"])
def test_an_invalid_move_ends_the_games_that_swap_its_reason_and_its_reward(game):
    env, _ = started(game)
    forgiven = env.step("no such move")
    assert "Reason: Bad action" in forgiven[0] or "Reason: Invalid action format" in forgiven[0]
    _, reward, terminated, _, info = env.step("no such move")
    assert (terminated, info["success"], info["invalid"]) == (True, False, True)
    assert 0 <= reward < 1
