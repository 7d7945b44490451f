"""Players who lose TextArena's games, and what a loss pays, from the game as it is in the end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, permutations
from typing import Any

from textarena_players import WAYS, jumps, pegs


def lose_2048(game: Any) -> Iterator[str]:
    size = game.board_size
    board = [[8 << (row + column) % 2 for column in range(size)] for row in range(size)]
    game.state.game_state["board"] = [[0, *board[0][:-1]], *board[1:]]
    yield "left"


def lose_crosswords(game: Any) -> Iterator[str]:
    solution = game.state.game_state["solution"]
    row, column = next((r, c) for r, line in enumerate(solution) for c, letter in enumerate(line) if letter != ".")
    yield from [f"{row} {column} {'a' if solution[row][column].lower() != 'a' else 'b'}"] * 2


def lose_guess_the_number(game: Any) -> Iterator[str]:
    yield from (str(number) for number in range(game.min_number, game.max_number + 1) if number != game.game_number)


def lose_hangman(game: Any) -> Iterator[str]:
    yield from sorted({*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"} - {*game.state.game_state["target_letters"]})


def lose_logic_puzzle(game: Any) -> Iterator[str]:
    row, marks = next(iter(next(iter(game.game_board_solution.values())).items()))
    yield from (f"{row} {next(iter(marks))} {mark}" for mark in cycle("XO"))


def lose_mastermind(game: Any) -> Iterator[str]:
    for guess in permutations(range(1, game.num_numbers + 1), game.code_length):
        if list(guess) != game.state.game_state["secret_code"]:
            yield " ".join(str(digit) for digit in guess)


def lose_minesweeper(game: Any) -> Iterator[str]:
    yield "0 0"
    mine = next((r, c) for r in range(game.rows) for c in range(game.cols) if game.grid[r][c] == -1)
    yield from [f"{mine[0]} {mine[1]}"] * 2


def lose_peg_jump(game: Any) -> Iterator[str]:
    while True:
        yield next(jumps(game, pegs(game)))[0]


def lose_sokoban(game: Any) -> Iterator[str]:
    row, column = game.player_position
    there = next(way for way, (r, c) in WAYS.items() if game.room_state[row + r, column + c] in (1, 2))
    yield from cycle([there, {"up": "down", "down": "up", "left": "right", "right": "left"}[there]])


def lose_sudoku(game: Any) -> Iterator[str]:
    row, column = next((r, c) for r in range(9) for c in range(9) if not game.game_board[r][c])
    yield from [f"{row + 1} {column + 1} {game.full_grid[row][column] % 9 + 1}"] * 2


def lose_wordle(game: Any) -> Iterator[str]:
    words = sorted(word for word in game.dictionary.us_words if len(word) == game.word_length and word.isalpha())
    yield from (word for word in words if word != game.state.game_state["secret_word"])


def share_of_the_way(game: Any) -> float:
    steps = sum(abs(a - b) for a, b in zip(game.state.game_state["player_pos"], game.player_pos, strict=True))
    return max(0.1, steps / (2 * game.size - 2))


def nearness(game: Any) -> float:
    return 1 - abs(game.state.game_state["guess_history"][-1][0] - game.game_number) / (game.max_number - 1)


def first_mark(game: Any) -> bool:
    """Whether the one cell with a mark has the right one."""
    grid, solution = next(iter(game.game_board.values())), next(iter(game.game_board_solution.values()))
    return next(iter(next(iter(grid.values())).values())) == next(iter(next(iter(solution.values())).values()))


def pegs_of_the_last(game: Any) -> float:
    last = game.state.game_state["history"][-1]
    return (last["black"] + last["white"] / 2) / game.code_length


def letters_of_the_last(game: Any) -> float:
    feedback = game.state.game_state["guess_history"][-1][1]
    return (feedback.count("G") + feedback.count("Y") / 2) / game.word_length


def share_of_numbers(game: Any) -> float:
    """The numbers with as many edges as they say; only the first cell has one at its top."""
    cells = [(r, c, clue) for r, row in enumerate(game.clues) for c, clue in enumerate(row) if clue is not None]
    return sum(clue == ((0, 0) in game.h_edges and (r, c) == (0, 0)) for r, c, clue in cells) / len(cells)
