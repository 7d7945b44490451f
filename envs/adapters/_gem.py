"""Fixes for GEM's games whose outcome contradicts their instructions; see docs/envs/gem.md.

Each function makes a subclass of the game's class, which GEM imports only when such a game is made.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product
from typing import Any


def _minesweeper(base: Any) -> type:
    class Minesweeper(base):
        """Won when every cell without a mine is revealed, as the instructions say; GEM wants all mines flagged, too."""

        def _is_solved(self) -> bool:
            cells = product(range(self.rows), range(self.cols))
            return all(self.revealed[row][column] or self.grid[row][column] == -1 for row, column in cells)

    return Minesweeper


def _hangman(base: Any) -> type:
    class Hangman(base):
        """Won with the last letter, too; GEM wants the whole word to be named once more."""

        def step(self, action: str) -> Any:
            text, reward, ended, truncated, info = super().step(action)
            if "_" in self.board or (ended and not truncated):
                return text, reward, ended, truncated, info
            return f"Congratulations! The word is '{self.secret_word}'.", reward + 0.5, True, False, info

    return Hangman


def _fifteen_puzzle(base: Any) -> type:
    class FifteenPuzzle(base):
        """Begins with a board that is not solved yet and can be; half of GEM's cannot."""

        def _generate_board(self) -> list[list[int | None]]:
            while True:
                board: list[list[int | None]] = super()._generate_board()
                size = len(board)
                tiles = [tile or size**2 for row in board for tile in row]
                row, column = divmod(tiles.index(size**2), size)
                swaps = sum(first > second for first, second in combinations(tiles, 2))
                if swaps and (swaps + row + column) % 2 == 0:  # a move changes both parities, and the goal's are even
                    return board

    return FifteenPuzzle


def _word_search(base: Any) -> type:
    class WordSearch(base):
        """Pays once for a word; GEM pays again for its letters read from the end to the beginning."""

        def step(self, action: str) -> Any:
            answer = super().step(action)
            self.attempts = sorted({*self.attempts, *((*place[2:], *place[:2]) for place in self.attempts)})
            return answer

    return WordSearch


_MENDED: dict[str, Callable[[Any], type]] = {
    "FifteenPuzzleEnv": _fifteen_puzzle,
    "HangmanEnv": _hangman,
    "MinesweeperEnv": _minesweeper,
    "WordSearchEnv": _word_search,
}


def mend(game: Any) -> Any:
    """``game``, with a subclass from above for its class where there is one."""
    if subclass := _MENDED.get(type(game).__name__):
        game.__class__ = subclass(type(game))
    return game
