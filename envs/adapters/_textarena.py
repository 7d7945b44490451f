"""TextArena's games whose outcome is not what their rules say, put right; see docs/envs/textarena.md.

``won`` says whether a game that has ended is won, where a final reward of 1 does not say so.
"""

from __future__ import annotations

from typing import Any

import textarena
from textarena.envs.Blackjack.env import BlackjackEnv
from textarena.envs.Game2048.env import Game2048Env
from textarena.envs.Set.env import SetEnv
from textarena.envs.Slitherlink.env import SlitherlinkEnv

SET_TURNS = 20


class PlayerState(textarena.SinglePlayerState):
    """Takes reason and reward of an invalid move in either order: four games have them the wrong way round."""

    def set_invalid_move(self, reason: Any, reward: Any = -1.0) -> None:
        if isinstance(reward, str):
            reason, reward = reward, reason
        super().set_invalid_move(reason=reason, reward=reward)


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


_MENDED: tuple[type, ...] = (Blackjack, Game2048, Set, Slitherlink)


def mend(game: Any) -> Any:
    """``game``, with the class above for its own where there is one."""
    game.__class__ = {mended.__bases__[0]: mended for mended in _MENDED}.get(type(game), type(game))
    return game
