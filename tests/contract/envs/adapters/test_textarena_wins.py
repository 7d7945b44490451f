"""Every game of TextArena's that the adapter lists, played to a win and to a loss by its own rules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import chain, cycle, repeat
from pathlib import Path
from typing import Any

import nltk
import pytest
import textarena_players as players
from textarena_players import Player

from verl_turnkey.envs.adapters.textarena import GAMES, TextArenaText

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
        for name in ("Hangman", "WordLadder", "WordSearch", "Wordle"):  # they keep what they imported
            patch.delitem(sys.modules, f"textarena.envs.{name}.env", raising=False)
        yield lambda name: made.get(name) or made.setdefault(name, TextArenaText(name))
        for name in ("Hangman", "WordLadder", "WordSearch", "Wordle"):
            sys.modules.pop(f"textarena.envs.{name}.env", None)
        from nltk.corpus import words

        if hasattr(words, "_unload"):
            words._unload()


def play(env: TextArenaText, player: Player, seed: int) -> list[Any]:
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
    answers = play(environment(name), WINNERS[name.partition("-")[0]], SEEDS.get(name, 0))
    _, reward, terminated, truncated, info = answers[-1]
    assert (info["success"], terminated, truncated) == (True, True, False)
    assert reward == 1
    assert not any(answer[1] or answer[4]["success"] for answer in answers[:-1])
    assert not any(answer[4]["invalid"] for answer in answers)


@pytest.mark.parametrize("name", GAMES)
def test_every_listed_game_is_lost_by_its_own_rules(environment, name):
    env, family = environment(name), name.partition("-")[0]
    player, expected = LOSERS[family]
    answers = play(env, player, SEEDS.get(name, 0))
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
