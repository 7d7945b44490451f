"""TextArena's games whose outcome or boards are not what their rules say, put right; see docs/envs/textarena.md.

``won`` says whether a game that has ended is won, where a final reward of 1 does not say so.
"""

from __future__ import annotations

from typing import Any

import textarena
from textarena.envs.Bandit.env import BanditEnv
from textarena.envs.Blackjack.env import BlackjackEnv
from textarena.envs.FifteenPuzzle.env import FifteenPuzzleEnv
from textarena.envs.Game2048.env import Game2048Env
from textarena.envs.Set.env import SetEnv
from textarena.envs.Slitherlink.env import SlitherlinkEnv

SET_TURNS = 20


class Bandit(BanditEnv):
    """Naming the best button pays 1, another one 0. TextArena compares a name with a dict, and pays the regret."""

    def step(self, action: str) -> Any:
        answer = super().step(action)
        if self.state.done and not self.state.game_info[0]["invalid_move"] and self.state.rewards[0] == 1.0:
            self.state.game_info[0]["reason"] = "Congratulations! You chose the correct button."
        return answer

    def _regret(self, button: str) -> float:  # what step pays at the end, for each button
        return float(super()._regret(button) == 0.0)


class _Winnable(textarena.SinglePlayerState):
    def set_winners(self, player_ids: list[int], reason: str) -> None:
        """The puzzle calls it, and states for one player do not have it."""
        self.set_outcome(reward=1.0, reason=reason)


class FifteenPuzzle(FifteenPuzzleEnv):
    """Every board can be solved; half of all orders cannot."""

    def reset(self, num_players: int, seed: int | None = None) -> None:
        super().reset(num_players, seed)
        self.state.__class__ = _Winnable

    def _generate_board(self) -> list[list[int | None]]:
        board: list[list[int | None]] = super()._generate_board()
        if not solvable(board):
            (a, b), (c, d) = [(r, c) for r in range(4) for c in range(4) if board[r][c] is not None][:2]
            board[a][b], board[c][d] = board[c][d], board[a][b]
        return board


def solvable(board: list[list[int | None]]) -> bool:
    """Whether sliding orders the tiles: each slide along a column changes both parities below, one along a row none."""
    tiles = [tile for row in board for tile in row if tile is not None]
    inversions = sum(a > b for i, a in enumerate(tiles) for b in tiles[i + 1 :])
    blank = next(r for r, row in enumerate(board) if None in row)
    return (inversions + 3 - blank) % 2 == 0


class Set(SetEnv):
    """Won when each turn takes a set; pays the share of turns that did. Three times one card is not a set."""

    def won(self) -> bool:
        return self.state.game_state["score"] == SET_TURNS

    def step(self, action: str) -> Any:
        answer = super().step(action)
        if self.state.done and not self.state.game_info[0]["invalid_move"]:
            self.state.rewards = {0: self.state.game_state["score"] / SET_TURNS}
        return answer

    def _parse_action(self, action: str) -> tuple[int, int, int] | None:
        cards: tuple[int, int, int] | None = super()._parse_action(action)
        return cards if cards is not None and len(set(cards)) == 3 else None


class Blackjack(BlackjackEnv):
    """Won with more hands won than lost."""

    def won(self) -> bool:
        results = self.state.game_state["results_summary"]
        return results["win"] > results["lose"]


class Game2048(Game2048Env):
    """Won with the tile; a high score without it is worth 1 to TextArena, too."""

    def won(self) -> bool:
        return self._max_tile() >= self.target_tile


class Slitherlink(SlitherlinkEnv):
    """Won with one loop; all numbers without one are worth 1 to TextArena, too."""

    def won(self) -> bool:
        return self._is_solved()


_MENDED: tuple[type, ...] = (Bandit, Blackjack, FifteenPuzzle, Game2048, Set, Slitherlink)


def mend(game: Any) -> Any:
    """``game``, with the class above for its own where there is one."""
    game.__class__ = {mended.__bases__[0]: mended for mended in _MENDED}.get(type(game), type(game))
    return game
