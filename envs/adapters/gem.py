"""The games of GEM (Liu et al. 2025, "GEM: a gym for agentic LLMs"): Sokoban, Mastermind, Minesweeper, Hanoi, ...

GEM's games read and write text already. This adapter adds a state key, sets either ``terminated`` or ``truncated`` at
the end, gives each instance its own random state, and lets the episode go on after a malformed action.
"""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, ClassVar

import numpy as np

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.adapters._shared import OwnRandom
from verl_turnkey.envs.base import StepResult, TextEnv, check, digest, is_count, shortest_plan, words
from verl_turnkey.envs.errors import EnvironmentKwargsError, MissingPackageError, UnknownEnvironmentError

_handlers, _level = logging.root.handlers[:], logging.root.level
from gem.envs.registration import ENV_REGISTRY  # noqa: E402
from gem.envs.registration import make as make_game  # noqa: E402

logging.root.handlers[:], logging.root.level = _handlers, _level  # importing GEM configures the root logger

REWARDS = ("native", "success")
LEFT_OUT = {
    "FifteenPuzzle": "half of its boards cannot be solved",
    "Hangman": "it is not won with the last letter, only with the whole word",
    "Minesweeper": "its instructions ask to reveal every cell without a mine, and it also wants a flag on each mine",
    "WordSearch": "it pays again for a word that is read backwards",
}
"""games whose outcome contradicts their instructions"""
ARROWS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}


def _sokoban(game: Any) -> list[str] | None:
    def places(*kinds: int) -> frozenset[tuple[int, int]]:
        return frozenset((int(r), int(c)) for r, c in np.argwhere(np.isin(game.room_state, kinds)))

    free = {(int(r), int(c)) for r, c in np.argwhere(game.room_fixed != 0)}
    goals = {(int(r), int(c)) for r, c in np.argwhere(game.room_fixed == 2)}

    def moves(state: Any) -> Iterator[tuple[str, Any, bool]]:
        (row, column), boxes = state
        for word, (down, right) in ARROWS.items():
            to, beyond = (row + down, column + right), (row + 2 * down, column + 2 * right)
            if to in boxes and beyond in free and beyond not in boxes:
                pushed = boxes - {to} | {beyond}
                yield word, (to, pushed), pushed == goals
            elif to in free and to not in boxes:
                yield word, (to, boxes), False

    (player,) = places(5)
    return shortest_plan((player, places(3, 4)), moves)


WALL, FLOOR = (70, 70, 70), (235, 235, 235)
COLORS = (WALL, FLOOR, FLOOR, (50, 160, 70), (190, 130, 60), (50, 90, 210))
"""of Sokoban's cells by their number: wall, floor, goal, box on a goal, box, player"""
GOAL = (215, 40, 40)
LEGEND = """In the picture:
- walls are dark gray and the floor is white
- you, the player, are blue
- boxes are brown, and green on a goal
- goals have a red spot; you stand on one if the spot is in the blue

"""


def sokoban_picture(game: Any, tile: int) -> np.ndarray:
    """The board as RGB bytes (rows * tile, columns * tile, 3); each cell has a gray edge, a goal a red spot."""
    room, edge, spot = np.asarray(game.room_state), max(1, tile // 16), max(1, tile // 3)
    cells = np.empty((*room.shape, tile, tile, 3), np.uint8)
    for number, color in enumerate(COLORS):
        cells[room == number] = color
    goals = (np.asarray(game.room_fixed) == 2) & np.isin(room, (2, 5))
    cells[:, :, :edge] = cells[:, :, :, :edge] = 160
    inner = np.where(goals[..., None, None, None], GOAL, cells[:, :, spot:-spot, spot:-spot])
    cells[:, :, spot:-spot, spot:-spot] = inner
    rows, columns = room.shape
    return cells.transpose(0, 2, 1, 3, 4).reshape(rows * tile, columns * tile, 3)


def _hanoi(game: Any) -> list[str] | None:
    def moves(state: Any) -> Iterator[tuple[str, Any, bool]]:
        for source in range(3):
            for target in range(3):
                disk = state[source][-1:]
                if disk and source != target and (not state[target] or state[target][-1] > disk[0]):
                    after = [tower + disk if i == target else tower for i, tower in enumerate(state)]
                    after[source] = state[source][:-1]
                    yield f"{'ABC'[source]} {'ABC'[target]}", tuple(after), len(after[2]) == game.num_disks

    return shortest_plan(tuple(tuple(game.board[tower]) for tower in "ABC"), moves)


def _sudoku(game: Any) -> list[str]:
    cells = [(r, c, game.full_grid[r][c]) for r in range(game.scale) for c in range(game.scale) if not game.board[r][c]]
    return [f"{r + 1} {c + 1} {number}" for r, c, number in cells]


def _crosswords(game: Any) -> list[str]:
    cells = [(r, c, tile) for r, row in enumerate(game.board) for c, tile in enumerate(row)]
    return [f"{r} {c} {game.solution[r][c]}" for r, c, tile in cells if tile == "_"]


@dataclass(frozen=True)
class Game:
    """What the adapter needs to know about a game and GEM does not tell."""

    state: tuple[str, ...]
    """the attributes that make up its state, hidden parts included"""
    actions: tuple[str, ...] | None = None
    """all actions; None: they are too many, and ``form`` describes them"""
    form: str = ""
    """regular expression of an action, as GEM reads it inside the braces of ``\\boxed{}``"""
    solve: Callable[[Any], list[str] | None] = lambda game: None
    """actions that win; gets a copy of the game, and may change it and read its hidden state"""
    guesses: bool = False
    """whether a wrong guess leaves the state unchanged; elsewhere an unchanged state means a refused action"""


GAMES = {
    "Game2048": Game(("board", "target_tile", "max_tile_achieved", "init_max_tile_achieved"), tuple(ARROWS)),
    "Crosswords": Game(
        ("board", "solution", "clues"), form=r"[0-9]{1,9} [0-9]{1,9} [a-zA-Z]", solve=_crosswords, guesses=True
    ),
    "GuessTheNumber": Game(
        ("min_number", "max_number", "game_number", "previous_guesses"),
        form=r"0*[1-9][0-9]{0,8}",
        solve=lambda game: [str(game.game_number)],
    ),
    "Mastermind": Game(
        ("game_code", "num_numbers", "previous_guesses", "milestone"),
        form=r"[0-9]{1,9}( [0-9]{1,9})*",
        solve=lambda game: [" ".join(str(digit) for digit in game.game_code)],
    ),
    "Sokoban": Game(("room_fixed", "room_state"), tuple(ARROWS), solve=_sokoban),
    "Sudoku": Game(("board", "full_grid"), form=r"[0-9]{1,9} [0-9]{1,9} [0-9]{1,9}", solve=_sudoku),
    "TowerofHanoi": Game(("board",), ("A B", "A C", "B A", "B C", "C A", "C B"), solve=_hanoi),
    "Wordle": Game(
        ("secret_word", "previous_guesses", "milestones"),
        form=r"[a-zA-Z]+",
        solve=lambda game: [game.secret_word.lower()],
    ),
}


class GEMText(TextEnv):
    """One of GEM's games.

    Args:
        game: id of a game, with or without GEM's prefix ``game:``, such as ``Sokoban-v0-easy``.
        reward: ``native`` is the game's own, with partial credit where GEM gives it, at the turn limit for example;
            ``success`` gives 1.0 for winning and 0.0 otherwise.
        images: Sokoban only: show the board as a picture, not as text.
        tile: side of a cell in pictures, in pixels.
        **kwargs: arguments of the game, over those that GEM registered for the id: ``max_turns`` (the limit of the
            episode), ``num_boxes``, ``dim_room``, ...

    An action is what GEM reads inside the braces of ``\\boxed{}``: ``up``, ``2 3 9``, ``A C``. Any other text
    leaves the state unchanged, takes a turn and is ``invalid``; GEM would end the episode. Where the game has no list
    of ``admissible`` actions, one that GEM refuses (out of bounds, a repeated guess) is ``invalid`` too. A listed
    action is always valid, also one without effect, such as a move into a wall. ``state_key`` is a hash of the game's
    state, hidden parts included, without the turn number. The seed determines the start; the program's random state is
    not changed.

    Raises:
        UnknownEnvironmentError: no such game.
        EnvironmentKwargsError: arguments that the game does not take, or cannot be made with.
        MissingPackageError: the game needs a package or a word list that is not there.
    """

    metadata: ClassVar[dict[str, Any]] = {**TextEnv.metadata, "thread_safe": False, "memory_mb": 250}

    def __init__(
        self, game: str = "Sokoban-v0-easy", reward: str = "native", images: bool = False, tile: int = 16, **kwargs: Any
    ) -> None:
        super().__init__()
        names = [id.removeprefix("game:") for id in ENV_REGISTRY if id.startswith("game:")]
        games = [name for name in names if name.partition("-")[0] in GAMES]
        name = str(game).removeprefix("game:")
        rules = GAMES.get(name.partition("-")[0])
        if reason := LEFT_OUT.get(name.partition("-")[0]):
            raise UnknownEnvironmentError(f"{game!r} of GEM cannot be trained on: {reason}")
        if name not in games or rules is None:
            raise UnknownEnvironmentError(
                f"GEM has no game {game!r}{did_you_mean(name, games) or '.'} Its games: {', '.join(games)}"
            )
        check(reward in REWARDS, "reward", f"one of {', '.join(REWARDS)}", reward)
        check(isinstance(images, bool), "images", "true or false", images)
        check(not images or name.startswith("Sokoban"), "images", f"false, since {name} is not drawn", images)
        check(is_count(tile) and 4 <= tile <= 64, "tile", "an integer from 4 to 64", tile)
        self._tile = tile if images else 0
        self.rules = rules
        self._success_only = reward == "success"
        self._own_random = OwnRandom()  # GEM draws from the global state, and seeds it
        self.game = self._make(f"game:{name}", kwargs)
        goal, moves = getattr(self.game, "target_tile", 0), self.game.max_turns
        if self._success_only and goal > 4 * (moves + 1):  # a move adds a tile of 4 at most
            raise EnvironmentKwargsError(
                f"{name} is never won with max_turns={moves}, and reward=success would pay nothing: a tile of {goal} "
                f"takes {goal // 4 - 1} moves at least. Set max_turns (to {goal} or so), or reward=native"
            )

    @property
    def turn_limit(self) -> int:
        return self.game.max_turns

    def begin(self, seed: int) -> tuple[StepResult, str]:
        with self._own_random():
            task, _ = self.game.reset(seed % 2**32)
        if self._tile:
            task = re.sub(r"On the board, .*?\n\n", LEGEND, task, flags=re.DOTALL)
        seen = self._seen("", self.game.get_task_suffix())
        return StepResult(**seen, state_key=self._key(), admissible=self.rules.actions), task.strip()

    def act(self, action: str) -> StepResult:
        game, action = self.game, " ".join(action.split())
        if self.rules.actions:
            action = {words(known): known for known in self.rules.actions}.get(words(action), "")
        if not (action if self.rules.actions else re.fullmatch(self.rules.form, action)):
            game.turn_count += 1
            return replace(self.refused(), truncated=game.turn_count >= game.max_turns)
        before = self._key()
        with self._own_random():
            text, reward, ended, truncated, info = game.step(f"\\boxed{{{action}}}")
        key = self._key()
        # At its turn limit GEM sets both flags.
        terminated = ended and not truncated
        success = terminated and text.startswith("Congratulations")
        text = re.sub(r"^At turn \d+, ", "", text)  # prompts number the turns themselves
        return StepResult(
            **self._seen(f"{text[:1].upper()}{text[1:]}\n", info["suffix"]),
            state_key=key,
            admissible=self.rules.actions,
            reward=float(success) if self._success_only else float(reward),
            success=success,
            terminated=terminated,
            truncated=truncated,
            invalid=key == before and not terminated and not self.rules.actions and not self.rules.guesses,
        )

    def _seen(self, text: str, board: str) -> dict[str, Any]:
        """Observation and images of a result; ``board``: in words, with how to go on."""
        if not self._tile:
            return {"observation": text + board}
        request = board.strip().rpartition("\n")[2]
        return {"observation": text + request, "images": [sokoban_picture(self.game, self._tile)]}

    def oracle(self) -> list[str] | None:
        """A shortest solution of Sokoban and Hanoi, else the hidden solution; None for 2048."""
        kept = self._own_random.state
        with self._own_random():
            plan = self.rules.solve(copy.deepcopy(self.game))
        self._own_random.state = kept
        return plan if plan and len(plan) <= self.game.max_turns else None

    def _make(self, id: str, kwargs: dict[str, Any]) -> Any:
        spec = ENV_REGISTRY[id]
        module, _, class_name = str(spec.entry_point).partition(":")
        try:
            parameters = inspect.signature(getattr(import_module(module), class_name)).parameters
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"{id} needs the package {error.name!r}, which is not installed: pip install {error.name}"
            ) from error
        accepted = [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]
        for name in kwargs:  # GEM ignores unknown ones
            if name not in accepted:
                raise EnvironmentKwargsError(
                    f"{id} takes no argument {name!r}{did_you_mean(name, accepted) or '.'} "
                    f"It takes {', '.join(accepted)}"
                )
        try:
            with self._own_random():
                return make_game(id, **kwargs)
        except (TypeError, ValueError, LookupError, RuntimeError, RuntimeWarning) as error:
            if type(error) is LookupError:  # NLTK's own
                raise MissingPackageError(
                    f"{id} needs NLTK's word list: run `python -m nltk.downloader words`, or set NLTK_DATA to a folder "
                    "that holds corpora/words"
                ) from error
            arguments = {**spec.kwargs, **kwargs}
            raise EnvironmentKwargsError(f"GEM cannot make {id} with {arguments}: {error}") from error

    def _key(self) -> str:
        return digest([_plain(getattr(self.game, name)) for name in self.rules.state])


def _plain(value: Any) -> Any:
    """The value with sets and dicts sorted and arrays as lists, so that equal values have equal hashes."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return sorted(value.items())
    return sorted(value) if isinstance(value, set) else value
