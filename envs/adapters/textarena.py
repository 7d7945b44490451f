"""TextArena's single-player games (puzzles, board games and guessing games) and its two-player games.

Guertler et al. 2025, "TextArena". The games seed the global random states of Python and numpy and draw from them; here
each environment keeps a random state of its own, and the program's is restored after every call.
"""

from __future__ import annotations

import copy
import random
import re
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import textarena
from textarena.core import ObservationType
from textarena.envs.registration import ENV_REGISTRY
from textarena.wrappers import LLMObservationWrapper

from verl_turnkey.envs.adapters._shared import OwnRandom
from verl_turnkey.envs.base import StepResult, TextEnv, check, check_name, digest
from verl_turnkey.envs.errors import EnvironmentKwargsError, MissingPackageError, UnknownEnvironmentError

LEFT_OUT = {
    "2048-": "a high score without the tile pays 1, too",
    "BabyAiText-": "it calls TextArena in a way that no longer exists",
    "Bandit-": "it pays the regret, 0 for the best arm, and is never won",
    "Blackjack-": "it pays the share of hands won, and draws nothing",
    "Checkers-": "a player without a move raises an error",
    "Cryptarithm-": "seven letters with any digits pay 0.875",
    "Debate-": "a jury of paid models decides it",
    "DontSayIt-v0-unlimited": "it compares turns with a limit that it lacks, which raises an error",
    "FifteenPuzzle-": "half of its boards cannot be solved, and the move that solves one of the others raises an error",
    "Klondike-": "its source has a syntax error in every version of Python",
    "LightsOut-": "it may begin with all lights off, and pays as little as -7",
    "PegJump-": "four of its jumps bend, and the lowest row has none",
    "ScenarioPlanning-": "a jury of paid models decides it",
    "Set-": "it pays the number of sets, and three times one card is a set",
    "Slitherlink-": "all numbers without a loop pay 1, too",
    "SpiteAndMalice-": "a player may draw forever, so a game need not end",
    "Stratego-": "a battle raises an error",
    "Tak-": "a win raises an error",
    "TwentyQuestions-": "a list of words that holds the secret wins, and a secret with a hyphen cannot be guessed",
    "UltimateTexasHoldem-": "it is won after a thousand rounds, whatever was won in them",
    "UsedCar": "its instructions are not in the package",
    "WordChains-": "the seed does not determine its first word",
}
"""prefixes of the ids of games that cannot be trained on, and why"""


@cache
def players(entry_point: Any) -> int:
    """How many players a registered game is for: 1, 2, or 0 for any other number.

    Read from its source, because many games cannot be imported without more packages. A game from outside TextArena is
    assumed to be for one player.
    """
    module = str(entry_point).partition(":")[0].split(".")
    if module[0] != "textarena":
        return 1
    file = Path(textarena.__file__).parent.joinpath(*module[1:]).with_suffix(".py")
    source = file.read_text(encoding="utf-8") if file.is_file() else ""
    return 1 if "SinglePlayerState(" in source else 2 if "TwoPlayerState(" in source else 0


def games(number: int) -> list[str]:
    """The ids of all games for ``number`` players, without those left out and variants that differ only in wrappers."""
    return sorted(
        name
        for name, spec in ENV_REGISTRY.items()
        if not name.endswith(("-train", "-raw"))
        and not name.startswith(tuple(LEFT_OUT))
        and players(spec.entry_point) == number
    )


class PlayerState(textarena.SinglePlayerState):
    """Takes reason and reward of an invalid move in either order: Countdown and ThreeCardMonte swap them."""

    def set_invalid_move(self, reason: Any, reward: Any = -1.0) -> None:
        if isinstance(reward, str):
            reason, reward = reward, reason
        super().set_invalid_move(reason=reason, reward=reward)


# Secrets that a guess, letters only and in Wordle in small ones, can be.
_GUESSABLE: dict[str, Callable[[str], bool]] = {"HangmanEnv": str.isalpha, "WordleEnv": str.islower}

GAMES, TWO_PLAYERS = games(1), games(2)
ROLES = ("player 0", "player 1")
OPPONENTS = ("self", "random")
MOVES: dict[str, Callable[[Any, int], list[str]]] = {
    "Breakthrough": lambda *now: _steps_of_breakthrough(*now),
    "Briscola": lambda game, player: [
        f"play {n}" for n, _ in enumerate(game.state.game_state["players"][player]["hand"], 1)
    ],
    "Chopsticks": lambda game, player: _moves_of_chopsticks(
        *(game.state.game_state["hands"][p] for p in (player, 1 - player))
    ),
    "ConnectFour": lambda game, _: [
        f"col {n}" for n, top in enumerate(game.state.game_state["board"][0]) if top == "."
    ],
    "IteratedMatchingPennies": lambda *_: ["heads", "tails"],
    "IteratedRockPaperScissors": lambda *_: ["rock", "paper", "scissors"],
    "Nim": lambda game, _: [
        f"{pile} {number}" for pile, size in enumerate(game.state.game_state["piles"]) for number in range(1, size + 1)
    ],
    "Othello": lambda game, _: [f"{r}, {c}" for r, c in game.state.game_state["valid_moves"]] or ["skip"],
}
"""the moves of a player in games whose boards do not list them"""
LISTED = re.compile(
    r"(?:available moves|valid moves|available actions(?: are)?|remaining (?:hand|money cards)):(.*)", re.I
)
"""where a board lists the moves of the player who sees it"""
CHOICE = re.compile(r"\[([^\[\]]+)\]")
REWARDS = ("raw", "success")
COUNTERS = ("moves_made", "num_turns")  # count steps; left out of the state key
LARGE = 5000  # characters of an attribute's repr
OUT_OF_TURNS = re.compile(r"\b(turn|move) limit\b", re.IGNORECASE)
MOST_UNSOLVED = 0.95
"""that a game pays which is not won"""


class TextArenaText(TextEnv):
    """A game of TextArena. An action without square brackets gets them: ``up`` is sent as ``[up]``; not a question.

    Args:
        game: its id, such as ``Sokoban-v0`` or ``TowerOfHanoi-v0-medium``.
        options: arguments of the game, such as ``{"num_boxes": 1}``.
        reward: given at the last step: ``raw`` is the game's own, in most games the share that is solved, at most 0.95
            in a game that is not won; ``success`` is 1.0 for a won game, else 0.0.
        error_allowance: invalid moves in a row that do not end the game yet; None: the game's own limit, mostly one.
        opponent: in a game for two players: ``self``, the model plays both, or ``random``; who moves first alternates
            by seed then.
        max_steps: steps before truncation, beside the limit of the game itself.

    ``success``: the game is won by its rules, which is a final reward of 1; never after an invalid move that ends it.
    ``state_key`` is a hash of the game's data: board, hidden and found things, score, the streak of invalid moves,
    which decides when the game ends, and the conversation in games with talk; it leaves out the number of moves.
    """

    metadata = {**TextEnv.metadata, "memory_mb": 220}  # noqa: RUF012 - gymnasium's own attribute

    def __init__(
        self,
        game: str = "Sokoban-v0",
        options: Mapping[str, Any] | None = None,
        reward: str = "raw",
        error_allowance: int | None = None,
        opponent: str = "self",
        max_steps: int | None = None,
    ) -> None:
        super().__init__(max_steps)
        for beginning, why in LEFT_OUT.items():
            if str(game).startswith(beginning):
                raise UnknownEnvironmentError(f"{game!r} of TextArena cannot be trained on: {why}")
        two = game in TWO_PLAYERS
        if (spec := ENV_REGISTRY.get(str(game))) and not players(spec.entry_point):
            raise UnknownEnvironmentError(
                f"{game!r} of TextArena is for more than two players, or any number; expected a game for one or two"
            )
        check_name(game, (*GAMES, *TWO_PLAYERS), "TextArena has no game", "", UnknownEnvironmentError)
        check(opponent in OPPONENTS, "opponent", f"one of {', '.join(OPPONENTS)}", opponent)
        check(two or opponent == "self", "opponent", "left out in a game for one player", opponent)
        self._two, self._random_opponent = two, opponent == "random"
        self._moves = MOVES.get(str(game).partition("-")[0])
        # In games with talk, each player hears the other; in all others, the game itself reports the moves.
        training = ENV_REGISTRY.get(f"{game}-train")
        self._talk = two and training is not None and LLMObservationWrapper in (training.default_wrappers or ())
        if two and not self._random_opponent:
            self.metadata = {**self.metadata, "roles": ROLES}  # pyright: ignore[reportAttributeAccessIssue]
        check(reward in REWARDS, "reward", f"one of {', '.join(REWARDS)}", reward)
        whole = isinstance(error_allowance, int) and not isinstance(error_allowance, bool) and error_allowance >= 0
        check(error_allowance is None or whole, "error_allowance", "a whole number, or null", error_allowance)
        self._name, self._success_only, self._error_allowance = game, reward == "success", error_allowance
        self._own_random = OwnRandom()
        with self._own_random():
            self._game = self._blank = _make(game, dict(options or {}))
        # What the constructor made that is large, such as word lists: it does not change, and is slow to hash. And the
        # model that answers questions, whose connection cannot be copied.
        self._fixed = {
            name: value
            for name, value in vars(self._blank).items()
            if isinstance(value, textarena.Agent) or len(repr(_plain(value))) > LARGE
        }
        self._boards: dict[int, str] = {}

    def begin(self, seed: int) -> tuple[StepResult, str]:
        # Some games keep data from one episode to the next: each episode gets a copy of the unplayed one.
        self._game = copy.deepcopy(self._blank, {id(value): value for value in self._fixed.values()})
        with self._own_random():
            random.seed(seed)
            np.random.seed(seed % 2**32)
            self._game.reset(num_players=2 if self._two else 1, seed=seed)
        if not self._two:
            self._game.state.__class__ = PlayerState
        if self._error_allowance is not None:
            self._game.state.error_allowance = self._error_allowance
        self._boards = {}
        self._model, self._rng = seed % 2 if self._random_opponent else None, random.Random(seed)
        self._first = self._game.state.current_player_id
        result = self._now(self._opponents_moves(), done=False)
        return result, result.task

    def _opponents_moves(self) -> list[tuple[str, ObservationType]]:
        """Plays until it is the model's turn, or the game is over; what the model has heard then."""
        while self._model not in (None, self._mover) and not self._game.state.done:
            heard = [text for text, kind in self._heard() if kind == ObservationType.GAME_BOARD]
            self._boards[self._mover] = (heard or [self._boards.get(self._mover, "")])[-1]
            if not (moves := self._listed()):
                raise EnvironmentKwargsError(
                    f"{self._name!r} does not list its moves, from which opponent=random draws: leave it out"
                )
            with self._own_random():
                self._game.step(f"[{self._rng.choice(moves)}]")
        if self._game.state.done and self._model is not None:
            self._game.state.current_player_id = self._model
        return self._heard()

    def _listed(self) -> list[str]:
        """The moves of the player whose turn it is, where :data:`MOVES` or the game lists them.

        A player who has to move but has no move left loses by an invalid one.
        """
        if self._moves is not None:
            return self._moves(self._game, self._mover) or ["pass"]
        lines = LISTED.findall(self._boards.get(self._mover, ""))
        return CHOICE.findall(lines[-1]) if lines else []

    @property
    def _mover(self) -> int:
        return self._game.state.current_player_id if self._two else 0

    def act(self, action: str) -> StepResult:
        action = action.strip()
        bare = "[" not in action and "]" not in action and not self._talk and not self._name.startswith("GuessWho-")
        with self._own_random():
            mover, (done, _) = self._mover, self._game.step(f"[{action}]" if bare else action)
        if done and self._two:
            self._game.state.current_player_id = mover  # the last state is shown to who moved
        heard = self._heard() if done else self._opponents_moves()
        return self._now(heard, self._game.state.done if self._two else bool(done))

    def _now(self, heard: list[tuple[str, ObservationType]], done: bool) -> StepResult:
        prompt = "\n".join(message for message, kind in heard if kind == ObservationType.PROMPT)
        heard = [message for message in heard if message[1] != ObservationType.PROMPT]
        lines = [message for message, _ in heard]
        # In games with talk, boards are part of the dialogue: an earlier one no longer holds.
        boards = [message for message, kind in heard if kind == ObservationType.GAME_BOARD and not self._talk]
        if boards and self._two:  # those before are of the players' earlier turns
            lines = [message for message, kind in heard if kind != ObservationType.GAME_BOARD] + boards[-1:]
        if boards:
            self._boards[self._mover] = boards[-1]
        elif board := self._boards.get(self._mover):
            lines.append(board)
        state, final, success, ended = self._game.state, 0.0, False, {}
        of_two = (self._mover, *([state.logs] if self._talk else ())) if self._two else ()
        more: dict[str, Any] = {"task": "\n".join(line.strip() for line in prompt.splitlines())}
        if self._two:
            lists_moves = not done and getattr(self._game, "show_valid", True)
            more |= {
                "admissible": (self._listed() or None) if lists_moves else None,
                "extra": {"role": ROLES[self._mover]},
            }
        if done:
            rewards, infos = self._game.close()
            player = self._model if self._model is not None else self._first if self._two else 0
            final, ended = float(rewards[player]), infos[self._mover]
            lines.append(str(ended.get("reason") or ""))
            success = not infos[player].get("invalid_move") and final >= 1
            final = final if success else min(final, MOST_UNSOLVED)
            if self._two and self._model is None:
                more["outcome"] = {role: float(rewards[n]) for n, role in enumerate(ROLES)}
                final = 0.0
        # With two players, the turn limit is a rule that decides who has won.
        truncated = done and not success and not self._two and bool(OUT_OF_TURNS.search(str(ended.get("reason"))))
        return StepResult(
            observation="\n".join(line for line in lines if line) or "The game begins.",
            state_key=digest(self._name, done, state.error_count, self._state(), *of_two),
            reward=float(success) if self._success_only and "outcome" not in more else final,
            success=success,
            terminated=done and not truncated,
            truncated=truncated,
            # A valid move resets the count of errors; an invalid one that ends the game is reported at its end only.
            invalid=bool(ended.get("invalid_move", False)) or (not done and state.error_count > 0),
            **more,
        )

    def _state(self) -> Any:
        own = {name: value for name, value in vars(self._game).items() if name not in self._fixed and name != "state"}
        return _plain({**own, "state": self._game.state.game_state})

    def _heard(self) -> list[tuple[str, ObservationType]]:
        """The game's messages since the last call, and what the other player said if the players talk.

        It leaves out echoes of the player's own action, which some games garble.
        """
        heard = []
        for sender, message, kind in self._game.get_observation()[1]:
            speech = kind == ObservationType.PLAYER_ACTION
            if isinstance(message, str) and (not speech or (self._talk and sender != self._mover)):
                name = f"[{self._game.state.role_mapping[sender]}] " if speech else ""
                heard.append((name + message.strip(), kind))
        return heard


def _steps_of_breakthrough(game: Any, player: int) -> list[str]:
    forward, size = 1 if player == 0 else -1, game.board_size
    return [
        f"{chr(97 + column)}{row + 1}{chr(97 + column + aside)}{row + 1 + forward}"
        for row in range(size)
        for column in range(size)
        for aside in (-1, 0, 1)
        if 0 <= row + forward < size
        and 0 <= column + aside < size
        and game._is_valid_move(player, row, column, row + forward, column + aside)
    ]


def _moves_of_chopsticks(own: list[int], other: list[int]) -> list[str]:
    attacks = [f"attack {n} {m}" for n, mine in enumerate(own) for m, theirs in enumerate(other) if mine and theirs]
    total = sum(own)
    return attacks + [f"split {left} {total - left}" for left in range(total + 1) if left != own[0]]


_SIMPLE = (str, int, float, type(None))


def _make(game: str, options: dict[str, Any]) -> Any:
    try:
        made = textarena.make(game, **options)
    except LookupError as error:  # NLTK's, when it lacks a corpus
        raise MissingPackageError(
            f"{game!r} needs word lists that the package NLTK fetches: python -m nltk.downloader words "
            f"averaged_perceptron_tagger_eng ({' '.join(str(error).split())[:200]})",
            name="nltk",
        ) from error
    except SyntaxError as error:
        raise UnknownEnvironmentError(f"{game!r} of TextArena needs Python 3.12 or later: {error}") from error
    except TypeError as error:
        raise EnvironmentKwargsError(f"{game!r} does not take the options {options}: {error}") from error
    while isinstance(made, textarena.Wrapper):  # wrappers repeat the whole dialogue; the agent loop builds the prompts
        made = made.env
    if guessable := _GUESSABLE.get(type(made).__name__):
        made.word_list = [word for word in made.word_list if guessable(word)]
    return made


def _plain(value: Any) -> Any:
    """``value`` in plain types and sorted: the same state gives the same text in every process."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        return sorted((repr(key), _plain(part)) for key, part in value.items() if key not in COUNTERS)
    if isinstance(value, (set, frozenset)):
        return sorted(repr(_plain(part)) for part in value)
    if isinstance(value, (list, tuple, deque)):
        return [_plain(part) for part in value]
    if isinstance(value, _SIMPLE):
        return value
    kind = type(value)
    if not kind.__module__.startswith("textarena."):
        return kind.__name__
    names = (*getattr(kind, "__slots__", ()), *getattr(value, "__dict__", ()))
    return [kind.__name__, _plain({name: getattr(value, name) for name in names})]
