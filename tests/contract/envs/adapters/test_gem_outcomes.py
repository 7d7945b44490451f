"""Wins and losses of GEM's games, by the rules that their instructions state."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from verl_turnkey.envs import EnvironmentKwargsError
from verl_turnkey.envs.adapters.gem import GEMText

WORDS = "cat dog sun hat map pen able idea table stone river lemon summer winter picture kitchen"


@pytest.fixture
def word_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import nltk
    from nltk.corpus import words

    folder = tmp_path / "corpora" / "words"
    folder.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (folder / name).write_text(WORDS.replace(" ", "\n"))
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *_: False)
    yield
    if hasattr(words, "_unload"):
        words._unload()


def played(env: GEMText, actions: list[str]) -> tuple[float, bool, bool, bool, bool]:
    """The return; whether terminated, truncated, a success; and whether the last action was invalid."""
    total = 0.0
    for action in actions:
        _, reward, terminated, truncated, info = env.step(action)
        total += reward
        if terminated or truncated:
            break
    return round(total, 9), terminated, truncated, info["success"], info["invalid"]


def test_minesweeper_is_won_without_a_flag_and_lost_with_a_mine():
    env = GEMText("Minesweeper-v0-easy")
    env.reset(seed=0)
    plan = env.oracle()
    assert {action.split()[0] for action in plan} == {"reveal"}
    assert played(env, plan) == (1.0, True, False, True, False)
    env.reset(seed=0)
    assert played(env, [*plan[:-1], "flag 0 0"])[1:4] == (False, False, False)
    row, column = np.argwhere(np.array(env.game.grid) == -1)[0]
    total, *end = played(env, [f"reveal {row} {column}"])
    assert (total, end) == (0.0, [True, False, False, False])


def test_hangman_is_won_with_the_last_letter_and_with_the_word(word_list):
    for turns in (20, None):
        env = GEMText("Hangman-v0-hard", max_turns=turns or 20)
        env.reset(seed=1)
        letters = list(dict.fromkeys(env.game.secret_word))
        if turns is None:  # the last letter on the last turn
            env = GEMText("Hangman-v0-hard", max_turns=len(letters))
            env.reset(seed=1)
        assert played(env, letters) == (1.0, True, False, True, False)
    env.reset(seed=1)
    assert played(env, [letters[0], env.game.secret_word]) == (1.0, True, False, True, False)
    env.reset(seed=1)
    missed = played(env, [*letters[:-1], *[letters[0]] * 20])
    assert missed[1:4] == (False, True, False)
    assert 0 < missed[0] < 0.5


@pytest.mark.parametrize("game", ["FifteenPuzzle-v0-easy", "FifteenPuzzle-v0-hard"])
def test_tiles_begin_unsolved_and_can_be_ordered(game):
    env, boards = GEMText(game), set()
    for seed in range(30):
        env.reset(seed=seed)
        boards.add(str(env.game.board))
        if game.endswith("easy"):
            assert played(env, env.oracle()) == (1.0, True, False, True, False)
    assert len(boards) > 5
    if game.endswith("easy"):
        assert len(boards) <= 11  # half of 4! boards, without the solved one


def test_a_word_is_paid_once_read_either_way(word_list):
    env = GEMText("WordSearch-v0-easy")
    env.reset(seed=1)
    plan = env.oracle()
    back = [" ".join(action.split()[2:] + action.split()[:2]) for action in plan]
    key = env.step(plan[0])[4]["state_key"]
    for repeated in (plan[0], back[0]):
        _, reward, *_, info = env.step(repeated)
        assert (reward, info["invalid"], info["state_key"]) == (0.0, True, key)
    assert played(env, plan[1:])[1:] == (True, False, True, False)
    env.reset(seed=1)
    assert played(env, back) == (1.0, True, False, True, False)
    env.reset(seed=1)
    total, *end = played(env, [*plan[:-1], *back[:-1], *["0 0 0 1"] * 20])
    assert (total, end[:3]) == (pytest.approx((len(plan) - 1) / len(plan)), [False, True, False])


@pytest.mark.parametrize(("game", "goal", "moves"), [("hard", 512, 50), ("extreme-hard", 2048, 100)])
def test_2048_that_no_number_of_turns_allows_to_win_is_refused_where_only_winning_pays(game, goal, moves):
    name = f"Game2048-v0-{game}"
    with pytest.raises(EnvironmentKwargsError, match=rf"never won with max_turns={moves}.*a tile of {goal} takes"):
        GEMText(name, reward="success")
    assert GEMText(name).game.max_turns == moves
    assert GEMText(name, reward="success", max_turns=goal).game.target_tile == goal
    for fine in ("easy", "random"):
        GEMText(f"Game2048-v0-{fine}", reward="success")


def test_2048_is_won_with_the_tile_and_lost_without_a_move():
    env = GEMText("Game2048-v0-easy")
    env.reset(seed=0)
    start = env.game.max_tile_achieved
    env.game.board = [[32, 32, 0, 0], *[[0] * 4 for _ in range(3)]]
    assert played(env, ["left"]) == (1.0, True, False, True, False)
    env.reset(seed=0)
    assert env.game.max_tile_achieved == start
    env.game.board = [[8 << (row + column) % 2 for column in range(4)] for row in range(4)]
    env.game.board[0] = [0, *env.game.board[0][:-1]]
    total, *end = played(env, ["left"])
    assert end == [True, False, False, False]
    assert total < 1
