"""TextArena's games for one player: those left out, and fixes for those whose outcome contradicts their rules.

``won`` says whether a game that has ended is won, where a final reward of 1 does not; see docs/envs/textarena.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import textarena
from textarena.envs.Blackjack.env import BlackjackEnv
from textarena.envs.Cryptarithm.env import CryptarithmEnv
from textarena.envs.Game2048.env import Game2048Env
from textarena.envs.LightsOut.env import LightsOutEnv
from textarena.envs.PegJump.env import PegJumpEnv
from textarena.envs.registration import ENV_REGISTRY
from textarena.envs.Set.env import SetEnv, _has_set
from textarena.envs.Slitherlink.env import SlitherlinkEnv
from textarena.envs.TwentyQuestions.env import TwentyQuestionsEnv

LEFT_OUT = {
    "2048-v0-3x3": "nine cells hold no tile above 1024, and the goal is 2048; use 2048-v0 with the options "
    "board_size=3 and a lower target_tile",
    "BabyAiText-": "it calls TextArena in a way that no longer exists",
    "Bandit-": "it pays the regret, 0 for the best arm, and is never won",
    "FifteenPuzzle-": "half of its boards cannot be solved, and the move that solves one of the others raises an error",
    "Klondike-": "its source has a syntax error in every version of Python",
    "UltimateTexasHoldem-": "it is won after a thousand rounds, whatever was won in them",
}
"""beginnings of the ids of games for one player that cannot be trained on, and why"""
SET_TURNS = 20
PEG_JUMPS = (
    *((1, 2, 4), (1, 3, 6), (2, 4, 7), (2, 5, 9), (3, 5, 8), (3, 6, 10), (4, 5, 6), (4, 7, 11), (4, 8, 13)),
    *((5, 8, 12), (5, 9, 14), (6, 9, 13), (6, 10, 15), (7, 8, 9), (8, 9, 10), (11, 12, 13), (12, 13, 14), (13, 14, 15)),
)
"""the 18 lines of three holes of the triangle; a peg jumps along one, either way"""


@cache
def for_one_player(entry_point: Any) -> bool:
    """Whether a registered game is for one player, read from its source: many cannot be imported without more packages.

    A game from outside TextArena counts as one.
    """
    module = str(entry_point).partition(":")[0].split(".")
    if module[0] != "textarena":
        return True
    file = Path(textarena.__file__).parent.joinpath(*module[1:]).with_suffix(".py")
    return file.is_file() and "SinglePlayerState(" in file.read_text(encoding="utf-8")


def games() -> list[str]:
    """The ids of all games for one player, without those left out and the variants that only differ in wrappers."""
    return sorted(
        name
        for name, spec in ENV_REGISTRY.items()
        if not name.endswith(("-train", "-raw"))
        and not name.startswith(tuple(LEFT_OUT))
        and for_one_player(spec.entry_point)
    )


class PlayerState(textarena.SinglePlayerState):
    """Takes reason and reward of an invalid move in either order: four games have them the wrong way round."""

    def set_invalid_move(self, reason: Any, reward: Any = -1.0) -> None:
        if isinstance(reward, str):
            reason, reward = reward, reason
        super().set_invalid_move(reason=reason, reward=reward)


class Set(SetEnv):
    """Won when each turn takes a set; pays the share of turns that did. Three times one card is not a set.

    A board without a set gets more cards before it is shown; TextArena deals them after a turn has been lost on it.
    """

    def won(self) -> bool:
        return self.state.game_state["score"] == SET_TURNS  # pyright: ignore[reportOptionalSubscript]

    def close(self) -> Any:
        rewards, infos = super().close()
        return {0: rewards[0] / SET_TURNS}, infos

    def _observe_state(self) -> None:
        game: Any = self.state.game_state
        board, deck = game["board"], game["deck"]
        while deck and not _has_set(board):
            board += [deck.pop() for _ in range(3)]
        super()._observe_state()

    def _parse_action(self, action: str) -> tuple[int, int, int] | None:
        cards: tuple[int, int, int] | None = super()._parse_action(action)
        return cards if cards is not None and len(set(cards)) == 3 else None


class Blackjack(BlackjackEnv):
    """Won with more hands won than lost. A won hand pays 1, a draw half, so a won game pays more than a lost one."""

    def won(self) -> bool:
        results = self.state.game_state["results_summary"]  # pyright: ignore[reportOptionalSubscript]
        return results["win"] > results["lose"]

    def close(self) -> Any:
        _, infos = super().close()
        share = self._get_percentage_completion()
        return {0: share if self.won() and not infos[0]["invalid_move"] else min(share, 0.5)}, infos


class Cryptarithm(CryptarithmEnv):
    """Pays for the equation alone; to TextArena seven letters with any digits are worth 0.875, and eight nothing."""

    def won(self) -> bool:
        return len(self.mapping) == len(self.letters) and self._equation_holds()

    def close(self) -> Any:
        _, infos = super().close()
        return {0: float(self.won())}, infos


class Game2048(Game2048Env):
    """Won with the tile; a high score without it is worth 1 to TextArena, too."""

    def won(self) -> bool:
        return self._max_tile() >= self.target_tile


class LightsOut(LightsOutEnv):
    """Begins with a light on, and pays no less than 0, however many lights are on in the end."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        try:
            super().reset(num_players, seed)
        except (
            ZeroDivisionError
        ):  # the random presses cancel, once in 10,000 boards; the next ones follow in the stream
            self.reset(num_players)

    def _get_percentage_completion(self) -> float:
        return max(0.0, super()._get_percentage_completion())


class PegJump(PegJumpEnv):
    """With the jumps of the triangle that it shows; TextArena's list has four that bend and lacks the lowest row."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        moves: Any = [*PEG_JUMPS, *(jump[::-1] for jump in PEG_JUMPS)]
        self.ALLOWED_MOVES = moves
        super().reset(num_players, seed)


class Slitherlink(SlitherlinkEnv):
    """Won with one loop; all numbers without one are worth 1 to TextArena, too."""

    def won(self) -> bool:
        return self._is_solved()


class TwentyQuestions(TwentyQuestionsEnv):
    """A guess is the secret, not a list that contains it. Capitals and hyphens, which TextArena cannot read, are equal
    to small letters and spaces."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        super().reset(num_players, seed)
        self.game_word = self.game_word.lower().replace("-", " ")

    def step(self, action: str) -> Any:
        guess = re.search(r"\[([a-zA-Z\s-]+)\]", action)
        if guess and "?" not in action:
            word = re.sub(r"^(an?|the) ", "", " ".join(guess[1].lower().replace("-", " ").split()))
            action = f"[{word if word == self.game_word else 'x'}]"
        return super().step(action)


_MENDED: tuple[type, ...] = (
    *(Blackjack, Cryptarithm, Game2048, LightsOut),
    *(PegJump, Set, Slitherlink, TwentyQuestions),
)
# Secrets that a guess, letters only and in Wordle in small ones, can be.
_GUESSABLE: dict[str, Callable[[str], bool]] = {"HangmanEnv": str.isalpha, "WordleEnv": str.islower}


def mend(game: Any) -> Any:
    """``game``, with the class above for its own where there is one, and with secrets that can be guessed."""
    kind = type(game)
    game.__class__ = {mended.__bases__[0]: mended for mended in _MENDED}.get(kind, kind)
    if guessable := _GUESSABLE.get(kind.__name__):
        game.word_list = [word for word in game.word_list if guessable(word)]
    return game
