"""Players who win or lose TextArena's games. They take a game, yield actions, and may look at what the game hides.

Also what a loss pays, from the game as it is in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, permutations, product
from typing import Any

import numpy as np

from verl_turnkey.envs.base import shortest_plan

Player = Callable[[Any], Iterator[str]]
WAYS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def win_countdown(game: Any) -> Iterator[str]:
    def moves(numbers: Any) -> Iterator[tuple[str, Any, bool]]:
        for i, j in permutations(range(len(numbers)), 2):
            a, b = numbers[i], numbers[j]
            rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
            for sign, value in (("+", a + b), ("*", a * b), ("-", a - b)):
                if 0 < value < 1000:
                    yield f"{i} {j} {sign}", (*rest, value), value == game.target

    yield from shortest_plan(tuple(game.numbers), moves)


def win_crosswords(game: Any) -> Iterator[str]:
    for r, row in enumerate(game.state.game_state["solution"]):  # a row in one action: more letters than turns
        if letters := [f"[{r} {c} {letter}]" for c, letter in enumerate(row) if letter != "."]:
            yield " ".join(letters)


def walk(game: Any, goal: str) -> list[str]:
    state = game.state.game_state

    def moves(place: Any) -> Iterator[tuple[str, Any, bool]]:
        for way, (down, right) in WAYS.items():
            row, column = place[0] + down, place[1] + right
            if 0 <= row < game.size and 0 <= column < game.size and state["grid"][row][column] in (" ", goal):
                yield way, (row, column), state["grid"][row][column] == goal

    return shortest_plan(tuple(state["player_pos"]), moves)


def win_logic_puzzle(game: Any) -> Iterator[str]:
    for grid in game.game_board_solution.values():
        yield from (f"{row} {column} {mark}" for row, marks in grid.items() for column, mark in marks.items())


def win_mastermind(game: Any) -> Iterator[str]:
    yield " ".join(str(digit) for digit in game.state.game_state["secret_code"][::-1])
    yield " ".join(str(digit) for digit in game.state.game_state["secret_code"])


def win_minesweeper(game: Any) -> Iterator[str]:
    yield "0 0"
    for row, column in product(range(game.rows), range(game.cols)):
        if game.grid[row][column] != -1 and not game.revealed[row][column]:
            yield f"{row} {column}"


def win_rush_hour(game: Any) -> Iterator[str]:
    cars = list(game.state.game_state["vehicles"].values())

    def moves(places: Any) -> Iterator[tuple[str, Any, bool]]:
        def cells(car: Any, place: int) -> set[tuple[int, int]]:
            return {(car.row, place + k) if car.horizontal else (place + k, car.col) for k in range(car.length)}

        parked = [cells(car, place) for car, place in zip(cars, places, strict=True)]
        for k, car in enumerate(cars):
            others = set().union(*parked[:k], *parked[k + 1 :])
            for sign, place in (("+", places[k] + 1), ("-", places[k] - 1)):
                if 0 <= place <= 6 - car.length and not cells(car, place) & others:
                    yield f"{car.vid}{sign}", (*places[:k], place, *places[k + 1 :]), car.vid == "X" and place == 4

    yield from shortest_plan(tuple(car.col if car.horizontal else car.row for car in cars), moves)


def accept(game: Any, best: bool) -> Iterator[str]:
    draws = game.state.game_state["draws"]
    yield from ["continue"] * next(k for k, draw in enumerate(draws) if (draw == max(draws)) == best)
    yield "accept"


def win_sokoban(game: Any) -> Iterator[str]:
    def places(room: np.ndarray, *kinds: int) -> frozenset[tuple[int, int]]:
        return frozenset((int(row), int(column)) for row, column in np.argwhere(np.isin(room, kinds)))

    free, goals = places(game.room_fixed, 1, 2), places(game.room_fixed, 2)

    def moves(state: Any) -> Iterator[tuple[str, Any, bool]]:
        (row, column), boxes = state
        for way, (down, right) in WAYS.items():
            to, beyond = (row + down, column + right), (row + 2 * down, column + 2 * right)
            if to in boxes and beyond in free and beyond not in boxes:
                pushed = boxes - {to} | {beyond}
                yield way, (to, pushed), pushed == goals
            elif to in free and to not in boxes:
                yield way, (to, boxes), False

    (player,) = places(game.room_state, 5)
    yield from shortest_plan((player, places(game.room_state, 3, 4)), moves, max_states=2_000_000)


def win_sudoku(game: Any) -> Iterator[str]:
    for row, column in product(range(9), repeat=2):
        if not game.game_board[row][column]:
            yield f"{row + 1} {column + 1} {game.full_grid[row][column]}"


def win_hanoi(game: Any) -> Iterator[str]:
    def move(disks: int, source: str, target: str, spare: str) -> Iterator[str]:
        if disks:
            yield from move(disks - 1, source, spare, target)
            yield f"{source} {target}"
            yield from move(disks - 1, spare, target, source)

    yield from move(game.num_disks, "A", "C", "B")


def ladder(game: Any) -> list[str]:
    def moves(word: str) -> Iterator[tuple[str, str, bool]]:
        for other in game.word_list:
            if len(other) == len(word) and sum(a != b for a, b in zip(word, other, strict=True)) == 1:
                yield other, other, other == game.target_word

    return shortest_plan(game.start_word, moves)


def win_word_search(game: Any) -> Iterator[str]:
    for word, (row, column, direction) in game.placed_words.items():
        last = len(word) - 1
        yield f"{row} {column} {row + last * (direction == 'down')} {column + last * (direction == 'across')}"


def question(game: Any, guesses: list[str]) -> Iterator[str]:
    """Asks, without brackets, a game master who always says no; then guesses."""
    game.gamemaster = lambda prompt: "No"
    yield "Is it red"
    yield from guesses


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


# --- two players: actions to try, in games that do not list them ------------------------------------------------------
def coordinates(size: int) -> list[str]:
    return [f"{column}{row}" for column in "abcdefghij"[:size] for row in range(1, size + 1)]


def unseen(game: Any) -> list[str]:
    tracked = game.state.game_state["tracking_board"][game.state.current_player_id]
    return [f"{chr(65 + r)}{c}" for r, row in enumerate(tracked) for c, cell in enumerate(row) if cell == "~"]


def unmatched(game: Any) -> list[str]:
    places = [*product(range(game.grid_size), repeat=2)]
    pairs = permutations([place for place in places if place not in game.state.game_state["matched_positions"]], 2)
    return [f"{a} {b} {c} {d}" for (a, b), (c, d) in pairs]


def lines_of_action(game: Any) -> list[str]:
    board, side = game.state.game_state["board"], "OX"[game.state.current_player_id]
    moves = []
    for (r, c), down, right in product(product(range(8), repeat=2), (-1, 0, 1), (-1, 0, 1)):
        if board[r][c] == side and (down or right):
            distance = game._count_pieces_on_line(r, c, down, right)
            end = r + distance * down, c + distance * right
            if all(0 <= place < 8 for place in end):
                moves.append(game.rc_to_coord(r, c) + game.rc_to_coord(*end))
    return moves


def leaps(size: int) -> list[str]:
    squares = coordinates(size)
    near = [
        (a, b) for a, b in permutations(squares, 2) if all(abs(ord(x) - ord(y)) <= 2 for x, y in zip(a, b, strict=True))
    ]
    return [f"{a} {b}" for a, b in near]


def longest_words(game: Any) -> list[str]:
    state = game.state.game_state
    fitting = {word for word in game.dictionary.us_words if {*word} <= state["allowed_letters"]}
    least = len((state["word_history"] or [""])[-1])
    return sorted((w for w in fitting.difference(state["word_history"]) if len(w) >= least), key=lambda w: (len(w), w))[
        -1:
    ]


BIDS = ["hi", "[Bid on Item 0: 100] [Bid on Item 2: 20]"]
TRIES: dict[str, Callable[[Any], list[str]]] = {
    "Alquerque": lambda game: leaps(5),
    "Battleship": unseen,
    "ColonelBlotto": lambda game: [
        " ".join(f"{name}{game.num_total_units if name == full else 0}" for name in game.field_names)
        for full in game.field_names
    ],
    "DontSayIt": lambda game: ["hello there", "an apple", "the river"],
    "GermanWhist": lambda game: [f"play {n}" for n in range(1, 14)],
    "Golf": lambda game: ["draw", "take", "discard", *(f"swap {r} {c}" for r, c in product((1, 2, 3), repeat=2))],
    "IndianPoker": lambda game: ["check", "fold", "call", "bet 2", "raise 3"],
    "IteratedPrisonersDilemma": lambda game: ["I trust you", "[Defect]", "[Cooperate]"],
    "IteratedTwoThirdsAverage": lambda game: ["0", "33.3", "100"],
    "IteratedUltimatumGame": lambda game: ["[Offer: $10]", "[Accept]", "[Reject]"],
    "LetterAuction": lambda game: ["pass", "bid 2", "apple"],
    "LinesOfAction": lines_of_action,
    "MemoryGame": unmatched,
    "NewRecruit": lambda game: ["[Propose] ABCDEABC", "[Accept]", "[Reject]"],
    "Othello": lambda game: [f"{r}, {c}" for r, c in product(range(game.N), repeat=2)],
    "QuantumTicTacToe": lambda game: [f"{a},{b}" for a, b in permutations(range(9), 2)],
    "SimpleBlindAuction": lambda game: BIDS,
    "SimpleNegotiation": lambda game: ["[Offer: 1 Wood -> 1 Ore]", "[Accept]", "[Deny]"],
    "SpellingBee": longest_words,
    "TruthAndDeception": lambda game: ["it is the first", "[Fact 1]", "[Fact 2]"],
    "TwoDollar": lambda game: ["Half each. [Propose] $1.00", "Well. [Accept]", "No. [Reject]"],
    "UltimateTicTacToe": lambda game: [f"{a} {b}" for a, b in product(range(9), repeat=2)],
}
