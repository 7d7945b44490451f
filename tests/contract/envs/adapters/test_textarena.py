"""TextArena's games for one player and for two."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import nltk
import numpy as np
import pytest
import textarena_players as players
from textarena_players import Player

from verl_turnkey.envs import EpisodeOverError, make
from verl_turnkey.envs.adapters.textarena import GAMES, MOVES, TWO_PLAYERS, TextArenaText
from verl_turnkey.envs.checking.report import check
from verl_turnkey.envs.errors import EnvironmentKwargsError, MissingPackageError, UnknownEnvironmentError

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


# --- every listed game, played to a win and to a loss by its own rules ------------------------------------------------


LADDER = ["".join("abcdef"[(k + 3 - place) // 4] for place in range(4)) for k in range(17)]  # one letter at a time
BASIC = [*LADDER, "apple", "table", "stone", "river", "lemon", "picture", "kitchen", "teacher"]
# Nobody can guess a name where guesses are put in small letters, nor a hyphen where they are letters only.
NAMES = [*(f"Ann{ending}" for ending in "abcdefghijklmnopqrstuvwxyz".upper()), "Jean-Pierre", "Abigail", "Bernard"]

WINNERS: dict[str, Player] = {
    "Countdown": players.win_countdown,
    "Crosswords": players.win_crosswords,
    "FrozenLake": lambda game: iter(players.walk(game, "G")),
    "GuessTheNumber": lambda game: iter([str(game.game_number % 20 + 1), str(game.game_number)]),
    "GuessWho": lambda game: players.question(game, [f"[{game.target_character['name']}]"]),
    "Hangman": lambda game: iter(dict.fromkeys(game.state.game_state["target_letters"])),
    "LogicPuzzle": players.win_logic_puzzle,
    "Mastermind": players.win_mastermind,
    "Minesweeper": players.win_minesweeper,
    "RushHour": players.win_rush_hour,
    "Secretary": lambda game: players.accept(game, best=True),
    "Sokoban": players.win_sokoban,
    "Sudoku": players.win_sudoku,
    "ThreeCardMonte": lambda game: iter([str(game.ball_pos)]),
    "TowerOfHanoi": players.win_hanoi,
    "WordLadder": lambda game: iter(players.ladder(game)),
    "WordSearch": players.win_word_search,
    "Wordle": lambda game: chain([next(players.lose_wordle(game))], [game.state.game_state["secret_word"]]),
}
Reward = float | Callable[[Any], float]
# A player who loses, and the reward of that: a number, or computed from the game as it is in the end.
LOSERS: dict[str, tuple[Player, Reward]] = {
    "Countdown": (lambda game: repeat("0 1 -"), 1 - (532 - 100) / 1000),
    "Crosswords": (players.lose_crosswords, 0.0),
    "FrozenLake": (lambda game: iter(players.walk(game, "H")), players.share_of_the_way),
    "GuessTheNumber": (players.lose_guess_the_number, players.nearness),
    "GuessWho": (lambda game: repeat("[Nobody]"), -1.0),
    "Hangman": (players.lose_hangman, 0.0),
    "LogicPuzzle": (players.lose_logic_puzzle, lambda game: float(players.first_mark(game)) / 18),
    "Mastermind": (players.lose_mastermind, players.pegs_of_the_last),
    "Minesweeper": (players.lose_minesweeper, 0.0),
    "RushHour": (lambda game: repeat("Z+"), lambda game: game.state.game_state["vehicles"]["X"].col / 4),
    "Secretary": (lambda game: players.accept(game, best=False), 0.0),
    "Sokoban": (players.lose_sokoban, 0.0),
    "Sudoku": (players.lose_sudoku, 0.0),
    "ThreeCardMonte": (lambda game: iter([str((game.ball_pos + 1) % 3)]), 0.0),
    "TowerOfHanoi": (lambda game: cycle(["A B", "B A"]), 0.0),
    "WordLadder": (
        lambda game: cycle([players.ladder(game)[0], game.start_word]),
        lambda game: sum(a == b for a, b in zip(game.current_word, game.target_word, strict=True)) / 4,
    ),
    "WordSearch": (lambda game: (f"0 0 {row} {row + 1}" for row in range(20)), 0.0),
    "Wordle": (players.lose_wordle, players.letters_of_the_last),
}
# With which the board is made and solved in a second.
SEEDS = {"Sokoban-v0-medium": 4, "Sudoku-v0-hard": 1}
# Ends after which there is no turn left; in all others the rules say that the game is lost.
OUT_OF_TURNS = ("GuessTheNumber", "LogicPuzzle", "Mastermind", "Sokoban", "TowerOfHanoi", "WordLadder", "Wordle")


WORD_GAMES = (
    "DontSayIt",
    "Hangman",
    "LetterAuction",
    "SpellingBee",
    "WordChains",
    "WordLadder",
    "WordSearch",
    "Wordle",
)
OF_WORDS = ("textarena.envs.utils.word_lists", *(f"textarena.envs.{name}.env" for name in WORD_GAMES))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], TextArenaText]]:
    """Environments by game; those of words have the lists above, and take each of these for a noun."""
    folder: Path = tmp_path_factory.mktemp("nltk") / "corpora" / "words"
    folder.mkdir(parents=True)
    (folder / "en-basic").write_text("\n".join(BASIC))
    (folder / "en").write_text("\n".join([*NAMES, *BASIC]))
    made: dict[str, TextArenaText] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nltk.data, "path", [str(folder.parents[1])])
        patch.setattr(nltk, "download", lambda *_, **__: True)
        patch.setattr(nltk, "pos_tag", lambda words: [(word, "NN") for word in words])
        patch.setenv("OPENROUTER_API_KEY", "none")
        for module in OF_WORDS:  # they keep what they imported
            patch.delitem(sys.modules, module, raising=False)
        yield lambda name: made.get(name) or made.setdefault(name, TextArenaText(name))
        for module in OF_WORDS:
            sys.modules.pop(module, None)
        from nltk.corpus import words

        if hasattr(words, "_unload"):
            words._unload()


def played(env: TextArenaText, player: Player, seed: int) -> list[Any]:
    """The answers to a player's actions until the game is over."""
    env.reset(seed=seed)
    answers = []
    for action in player(env._game):
        answers.append(env.step(action))
        if answers[-1][2] or answers[-1][3]:
            return answers
    raise AssertionError(f"the player gave up after {answers[-1]}")


@pytest.mark.parametrize("name", GAMES)
def test_every_listed_game_is_won_by_its_own_rules(environment, name):
    answers = played(environment(name), WINNERS[name.partition("-")[0]], SEEDS.get(name, 0))
    _, reward, terminated, truncated, info = answers[-1]
    assert (info["success"], terminated, truncated) == (True, True, False)
    assert reward == 1
    assert not any(answer[1] or answer[4]["success"] for answer in answers[:-1])
    assert not any(answer[4]["invalid"] for answer in answers)


@pytest.mark.parametrize("name", GAMES)
def test_every_listed_game_is_lost_by_its_own_rules(environment, name):
    env, family = environment(name), name.partition("-")[0]
    player, expected = LOSERS[family]
    answers = played(env, player, SEEDS.get(name, 0))
    _, reward, terminated, truncated, info = answers[-1]
    assert (info["success"], terminated, truncated) == (False, family not in OUT_OF_TURNS, family in OUT_OF_TURNS)
    assert reward == pytest.approx(expected(env._game) if callable(expected) else expected)
    assert reward <= 0.95
    assert not any(answer[1] or answer[4]["success"] for answer in answers[:-1])


@pytest.mark.parametrize(
    ("name", "guessable"), [("Hangman-v0-hardcore", str.isalpha), ("Wordle-v0-hardcore", str.islower)]
)
def test_secrets_that_no_guess_can_be_are_left_out(environment, name, guessable):
    secrets = environment(name)._game.word_list
    assert all(guessable(word) for word in secrets)
    assert "table" in secrets
    assert ("Abigail" in secrets) == (name == "Hangman-v0-hardcore")


def test_each_player_has_a_game():
    families = {name.partition("-")[0] for name in GAMES}
    assert WINNERS.keys() == LOSERS.keys() == families


# --- two players ------------------------------------------------------------------------------------------------------
WON = ["0", "3", "1", "4", "2"]
"""of both players by turns: the first fills a row"""


def test_two_players_take_turns_and_each_is_paid():
    env = TextArenaText("TicTacToe-v0")
    seen = [env.reset(seed=1)]
    assert seen[0][1]["task"].startswith("You are Player 0")
    seen += [(step[0], step[4]) for step in map(env.step, WON)]
    infos = [info for _, info in seen]
    assert [info["extra"]["role"] for info in infos] == ["player 0", "player 1"] * 2 + ["player 0", "player 0"]
    # Each is told its own part, once.
    assert infos[1]["task"].startswith("You are Player 1")
    assert not any("task" in info for info in infos[2:])
    assert infos[1]["admissible"] == [*"12345678"]
    assert all(text.count("Current Board") == 1 for text, _ in seen)
    assert infos[-1]["outcome"] == {"player 0": 1.0, "player 1": -1.0}
    assert infos[-1]["success"]


def test_an_invalid_move_keeps_the_turn_until_it_loses_the_game():
    env = TextArenaText("TicTacToe-v0")
    env.reset(seed=1)
    env.step("4")
    *_, terminated, _, info = env.step("4")
    assert (terminated, info["invalid"], info["extra"]) == (False, True, {"role": "player 1"})
    *_, terminated, _, info = env.step("4")
    assert (terminated, info["invalid"], info["outcome"]) == (True, True, {"player 0": 1.0, "player 1": -1.0})


@pytest.mark.parametrize("seed", range(6))
def test_against_a_random_opponent_it_is_a_game_for_one_player(seed: int):
    """Who moves first alternates by seed."""
    ends = []
    for _ in range(2):
        env, chance = make("turnkey/TextArena-v0", {"game": "TicTacToe-v0", "opponent": "random"}), random.Random(seed)
        _, info = env.reset(seed=seed)
        assert len(info["admissible"]) == 9 - seed % 2
        terminated = False
        while not terminated:
            text, reward, terminated, _, info = env.step(chance.choice(info["admissible"]))
            assert info["extra"]["role"] == f"player {seed % 2}"
        assert (reward == 1) == info["success"] == (f"Player {seed % 2} has won" in text)
        assert "outcome" not in info
        ends.append((text, reward))
    assert ends[0] == ends[1]
    assert "roles" not in env.unwrapped.metadata


LATER = ("Chess-", "IteratedStagHunt-", "ReverseTicTacToe-")
"""games that need Python 3.12"""


def random_game(env: TextArenaText, seed: int) -> tuple[list[tuple[str, dict[str, Any]]], tuple[Any, ...]]:
    """The states before the end, and what the last step returned."""
    chance, seen = random.Random(seed), [env.reset(seed=seed)]
    family, game = env._name.partition("-")[0], env._game
    game.state.error_allowance = 1_000  # moves are tried where the game does not list them
    while True:
        listed = seen[-1][1]["admissible"]
        tries = [chance.choice(listed)] if listed else players.TRIES.get(family, lambda _: [])(game)
        for action in chance.sample(tries, len(tries)):
            step = env.step(action)
            assert action == "pass" or not (listed and step[4]["invalid"]), action
            if step[2] or not step[4]["invalid"]:
                break
        else:  # no move is left
            game.state.error_allowance = 0
            step = env.step("pass")
        if step[2]:
            return seen, step
        seen.append((step[0], step[4]))


@pytest.mark.parametrize("name", [name for name in TWO_PLAYERS if not name.startswith(LATER)])
def test_every_game_for_two_is_played_to_its_end(environment, name):
    seen, (text, reward, terminated, truncated, info) = random_game(environment(name), seed=0)
    roles = [state["extra"]["role"] for _, state in seen]
    assert {*roles} == {"player 0", "player 1"}
    assert len({state["task"] for _, state in seen if "task" in state}) == 2  # each is told its own part, once
    assert (terminated, truncated, reward) == (True, False, 0.0)
    assert sorted(info["outcome"]) == ["player 0", "player 1"]
    assert sorted(info["outcome"].values()) in ([-1, 1], [0, 0])
    assert info["success"] == (info["outcome"][roles[0]] == 1)
    assert text


def test_games_that_need_a_later_python_say_so():
    for name in (name for name in TWO_PLAYERS if name.startswith(LATER) and sys.version_info < (3, 12)):
        with pytest.raises(UnknownEnvironmentError, match=f"'{name}' of TextArena needs Python 3.12 or later"):
            TextArenaText(name)


def test_kuhn_poker_shows_each_player_its_own_card_alone():
    env = TextArenaText("KuhnPoker-v0")
    texts: dict[tuple[str, str], set[str]] = {}
    cards = set()
    for seed in range(40):
        observation, info = env.reset(seed=seed)
        for action in ("check", "bet"):
            role = info["extra"]["role"]
            dealt = env._game.state.game_state["player_cards"]
            cards.add(tuple(dealt.values()))
            own = "JQK"[dealt[int(role[-1])]]
            assert f"Your card is: '{own}'" in observation
            texts.setdefault((role, own), set()).add(observation)
            observation, *_, info = env.step(action)
    assert len(cards) == 6
    assert len(texts) == 6  # whatever card the other has
    assert all(len(of_card) == 1 for of_card in texts.values())


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("ColonelBlotto-v0", ["A20", "C20"]),
        ("GameOfPureStrategy-v0", ["2", "K"]),
        ("HighSociety-v0", ["1", "11"]),
        ("IteratedMatchingPennies-v0", ["heads", "tails"]),
        ("IteratedRockPaperScissors-v0", ["rock", "paper"]),
        ("IteratedTwoThirdsAverage-v0", ["0", "100"]),
    ],
)
def test_a_choice_is_hidden_until_the_other_has_chosen(name: str, choices: list[str]):
    env = TextArenaText(name)
    heard = []
    for choice in choices:
        env.reset(seed=3)
        observation, *_, info = env.step(choice)
        heard.append((observation, info["extra"]["role"], info["task"], info["admissible"]))
    assert heard[0] == heard[1]


@pytest.mark.parametrize("name", ["DontSayIt-v0", "IteratedPrisonersDilemma-v0", "TruthAndDeception-v0"])
def test_who_talks_is_heard_by_the_other_alone(environment, name: str):
    env = environment(name)
    env.reset(seed=0)
    heard, *_, info = env.step("good morning")
    speaker = "Deceiver" if name.startswith("Truth") else "Player 0"
    assert heard.startswith(f"[{speaker}] good morning")
    assert "correct)" not in info["task"]
    assert "good morning" not in env.step("to you, too")[0]


def test_who_talks_is_shown_a_board_once():
    env = TextArenaText("IteratedPrisonersDilemma-v0")
    env.reset(seed=0)
    heard = [env.step(text)[0] for text in ("hello", "hello", "[Defect]", "[Defect]", "again")]
    assert ["Please reply with" in text for text in heard] == [False, True, True, False, False]
    env = TextArenaText("TwoDollar-v0")
    env.reset(seed=0)
    proposed = env.step("Half each. [Propose] $1.00")[0]
    assert "ROUND 2 of 20" in proposed
    assert "CURRENT PROPOSAL" in proposed


def test_what_was_said_is_part_of_the_state():
    env, keys = TextArenaText("IteratedPrisonersDilemma-v0"), []
    for text in ("hello", "I will defect", "hello"):
        env.reset(seed=0)
        keys.append(env.step(text)[4]["state_key"])
    assert keys[0] == keys[2] != keys[1]


DOCS = Path(__file__).parents[4] / "docs" / "envs" / "textarena.md"
[LIST] = re.findall("`admissible` lists the moves in (.*?)In these", DOCS.read_text(encoding="utf-8"), re.S)


@pytest.mark.parametrize("name", [name for name in TWO_PLAYERS if f"`{name.partition('-')[0]}`" in LIST])
def test_a_random_opponent_plays_where_moves_are_listed(name: str):
    """It never loses by an invalid move, unless it has no move left."""
    env = TextArenaText(name, opponent="random")
    for seed in range(2):
        seen, (*_, info) = random_game(env, seed)
        assert info["extra"]["role"] == f"player {seed}"
        assert all((state["admissible"] is None) == name.endswith("-hard") for _, state in seen)
        blocked = name.startswith("Breakthrough") and not MOVES["Breakthrough"](env._game, 1 - seed)
        assert blocked or not env._game.state.game_info[1 - seed]["invalid_move"]


def test_a_random_opponent_does_not_play_where_moves_are_not_listed():
    env = TextArenaText("Battleship-v0", opponent="random")
    env.reset(seed=0)
    with pytest.raises(EnvironmentKwargsError, match="'Battleship-v0' does not list its moves"):
        env.step("A0")


@pytest.mark.parametrize("opponent", ["self", "random"])
def test_a_player_without_a_move_passes_and_loses(opponent: str):
    env = TextArenaText("Breakthrough-v0-tiny", opponent=opponent)
    env.reset(seed=0)
    board = env._game.state.game_state["board"]
    # The black piece on a3 can neither step ahead nor take.
    board[:] = [[piece.strip() for piece in row] for row in ("    W", "W    ", "B    ", "     ", "     ")]
    *_, terminated, _, info = env.step("e1e2")
    if opponent == "self":
        assert info["admissible"] == ["pass"]
        assert not env.step("pass")[2]
        *_, terminated, _, info = env.step("pass")
        assert info["outcome"] == {"player 0": 1.0, "player 1": -1.0}
    assert terminated


@pytest.mark.parametrize("game", ["HighSociety-v0", "KuhnPoker-v0", "TruthAndDeception-v0"])
def test_env_check_finds_nothing_in_games_for_two(game: str):
    report = check("turnkey/TextArena-v0", {"game": game}, rollouts=2, processes=0)
    assert report.ok
    assert {*report.warned} <= {"key_repeats"}  # invalid actions are counted: two in a row end the game
