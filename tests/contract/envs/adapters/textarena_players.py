"""Players who win TextArena's games. They take a game, yield actions, and may look at what the game hides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, permutations, product
from typing import Any

import numpy as np

from verl_turnkey.envs.base import shortest_plan

Player = Callable[[Any], Iterator[str]]
WAYS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


@cache
def slide(line: tuple[int, ...]) -> tuple[int, ...]:
    tiles, k = [tile for tile in line if tile], 0
    while k < len(tiles) - 1:
        if tiles[k] == tiles[k + 1]:
            tiles[k] *= 2
            del tiles[k + 1]
        k += 1
    return (*tiles, *[0] * (len(line) - len(tiles)))


def slides(board: list[list[int]]) -> Iterator[tuple[str, list[list[int]]]]:
    """The moves that change the board, and what it becomes, without the new tile."""
    for way in WAYS:
        lines = [list(line) for line in (zip(*board, strict=True) if way in ("up", "down") else board)]
        turn = -1 if way in ("down", "right") else 1
        lines = [list(slide(tuple(line[::turn])))[::turn] for line in lines]
        after = [list(row) for row in zip(*lines, strict=True)] if way in ("up", "down") else lines
        if after != board:
            yield way, after


def worth(board: list[list[int]]) -> float:
    """High with the large tiles along a snake from the corner, and with empty cells."""
    size = len(board)
    snake = [board[row][column if row % 2 == 0 else size - 1 - column] for row in range(size) for column in range(size)]
    return sum(tile * 0.5**k for k, tile in enumerate(snake)) + (20 * snake.count(0) or -1000)


def outlook(board: list[list[int]]) -> float:
    """The mean worth after a new 2 in one of the first empty cells and the best move."""
    size = len(board)
    holes = [(row, column) for row in range(size) for column in range(size) if not board[row][column]][:8]
    total = 0.0
    for row, column in holes:
        board[row][column] = 2
        total += max((worth(after) for _, after in slides(board)), default=-1e6)
        board[row][column] = 0
    return total / len(holes)


def win_2048(game: Any) -> Iterator[str]:
    if game.target_tile > 4096:  # thousands of moves of a better player; here the last of them
        snake = [game.target_tile >> k for k in range(1, 14)]
        snake += [snake[-1], 0, 0]
        game.state.game_state["board"] = [snake[:4], snake[7:3:-1], snake[8:12], snake[15:11:-1]]
    large = game.board_size > 5
    while True:
        yield max(slides(game.state.game_state["board"]), key=lambda move: (worth if large else outlook)(move[1]))[0]


def win_blackjack(game: Any) -> Iterator[str]:
    while True:
        yield "Hit" if game._hand_score(game.state.game_state["player_hand"]) < 17 else "Stand"


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


def win_lights_out(game: Any) -> Iterator[str]:
    size = game.size
    for first in product((0, 1), repeat=size):  # presses of the first row decide all others
        lights = np.array(game.state.game_state["grid"], dtype=int)
        presses = []
        for row, column in product(range(size), repeat=2):
            if first[column] if row == 0 else lights[row - 1, column]:
                presses.append(f"{row} {column}")
                game._toggle_lights(lights, row, column)
        if not (lights % 2).any():
            yield from presses
            return


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


def jumps(game: Any, pegs: Any) -> Iterator[tuple[str, Any, bool]]:
    for start, over, end in game.ALLOWED_MOVES:
        if start in pegs and over in pegs and end not in pegs:
            yield f"{start} {end}", pegs - {start, over} | {end}, len(pegs) == 2


def pegs(game: Any) -> frozenset[int]:
    return frozenset(hole for hole, peg in enumerate(game.state.game_state["board"]) if peg)


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


def take(game: Any, sets: bool) -> Iterator[str]:
    while True:
        board = game.state.game_state["board"]
        for cards in combinations(range(len(board)), 3):
            if all(len({board[card][k] for card in cards}) != 2 for k in range(4)) == sets:
                yield ", ".join(str(card + 1) for card in cards)
                break


def win_slitherlink(game: Any) -> Iterator[str]:
    for top, left in product(range(game.R), range(game.C)):
        for bottom, right in product(range(top + 1, game.R + 1), range(left + 1, game.C + 1)):
            across = {(row, column) for row in (top, bottom) for column in range(left, right)}
            down = {(row, column) for row in range(top, bottom) for column in (left, right)}
            if all(
                clue is None
                or clue == sum([(r, c) in across, (r + 1, c) in across, (r, c) in down, (r, c + 1) in down])
                for r, row in enumerate(game.clues)
                for c, clue in enumerate(row)
            ):
                yield from (f"h {row} {column}" for row, column in sorted(across))
                yield from (f"v {row} {column}" for row, column in sorted(down))
                return


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


def win_peg_jump(game: Any) -> Iterator[str]:
    def search(left: frozenset[int]) -> list[str] | None:
        for action, after, won in jumps(game, left):
            if won or (after not in dead and (rest := search(after)) is not None):
                return [action] if won else [action, *rest]
        dead.add(left)
        return None

    dead: set[frozenset[int]] = set()
    yield from search(pegs(game)) or ()


def question(game: Any, guesses: list[str]) -> Iterator[str]:
    """Asks, without brackets, a game master who always says no; then guesses."""
    game.gamemaster = lambda prompt: "No"
    yield "Is it red"
    yield from guesses
