"""Two-player, turn-based games of OpenSpiel: Kuhn poker, tic-tac-toe, connect four, Leduc poker, hex, nim, ...

Lanctot et al. 2019, "OpenSpiel". Each role sees its own information state, and none of the other's cards.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyspiel

from verl_turnkey.envs.base import StepResult, TextEnv, check_name, digest, words
from verl_turnkey.envs.errors import EnvironmentKwargsError, UnknownEnvironmentError

ROLES = ("player 0", "player 1")
RULES = {
    "kuhn_poker": "Three cards: jack, queen, king. Each player pays 1 and gets one card. Bet adds 1; after a Bet, Pass "
    "folds and Bet calls. Without a fold the higher card wins what was paid.",
    "tic_tac_toe": "Three in a row win. Player 0 places x, player 1 places o, at (row,column), counted from 0.",
}
CARDS = ("jack", "queen", "king")
SMALL = 10_000
"""most states of a game for which its values are computed"""


def playable(game: Any) -> str | None:
    """Why a game cannot be played here; None: it can."""
    kind = game.get_type()
    if game.num_players() != 2:
        return f"it is for {game.num_players()} players, not for two"
    if kind.dynamics != pyspiel.GameType.Dynamics.SEQUENTIAL:
        return "its players move at the same time"
    if kind.chance_mode == pyspiel.GameType.ChanceMode.SAMPLED_STOCHASTIC:
        return "its chances do not follow from a seed"
    if not _view_of(kind):
        return "it does not describe in text what a player sees"
    return None


def _view_of(kind: Any) -> str:
    """The method that describes a state to a player: without hidden information the board is enough."""
    perfect = kind.information == pyspiel.GameType.Information.PERFECT_INFORMATION
    if perfect and kind.provides_observation_string:
        return "observation_string"
    return "information_state_string" if kind.provides_information_state_string else ""


class OpenSpielText(TextEnv):
    """A game of OpenSpiel for the roles ``player 0`` and ``player 1``.

    Args:
        game: its name, with parameters in brackets if it needs any: ``hex(board_size=4)``.
        max_steps: steps before truncation; None: the game ends by its rules.

    ``outcome`` is each player's return at the end; ``success``: player 0's is above 0.
    ``state_key`` is a hash of the whole state, hidden cards included.
    """

    metadata = {**TextEnv.metadata, "thread_safe": True, "memory_mb": 1, "roles": ROLES}  # noqa: RUF012 - gymnasium's own

    def __init__(self, game: str = "kuhn_poker", max_steps: int | None = None) -> None:
        super().__init__(max_steps)
        name = str(game).partition("(")[0]
        check_name(name, pyspiel.registered_names(), "OpenSpiel has no game", "", UnknownEnvironmentError)
        try:
            self._game = pyspiel.load_game(game)
        except pyspiel.SpielError as error:
            raise EnvironmentKwargsError(f"OpenSpiel does not load {game!r}: {' '.join(str(error).split())}") from None
        if why := playable(self._game):
            raise UnknownEnvironmentError(f"{game!r} of OpenSpiel cannot be played here: {why}")
        self._value = _minimax(SMALL)
        self._name, self._view = name, _view_of(self._game.get_type())
        rules = RULES.get(name, "") if str(self._game) == f"{name}()" else ""
        self._rules = f"{self._game.get_type().long_name}. {rules}".strip()

    def begin(self, seed: int) -> tuple[StepResult, str]:
        self._chance, self._state = random.Random(seed), self._game.new_initial_state()
        self._draw()
        return self._now(), self._task(self._state.current_player())

    def clone(self) -> OpenSpielText:
        """An independent copy in the same state."""
        other = OpenSpielText.__new__(OpenSpielText)
        other.__dict__.update(self.__dict__)
        other._chance, other._state = random.Random(), self._state.clone()
        other._chance.setstate(self._chance.getstate())
        return other

    def act(self, action: str) -> StepResult:
        mover = self._state.current_player()
        legal = {words(name): number for name, number in _legal(self._state).items()}
        if (number := legal.get(words(action))) is None:
            return self.refused()
        self._state.apply_action(number)
        self._draw()
        if not self._state.is_terminal():
            return self._now()
        returns = self._state.returns()
        return StepResult(
            observation=f"The game is over. You get {returns[mover]:g}.",
            state_key=digest(str(self._state)),
            terminated=True,
            success=returns[0] > 0,
            extra={"role": ROLES[mover]},
            outcome={role: float(returns[player]) for player, role in enumerate(ROLES)},
        )

    def policy(self) -> dict[str, float] | None:
        """The probability of each legal action for an optimal player; None where it is not known.

        By minimax in games of perfect information that are small; Kuhn poker's equilibrium (Kuhn 1950), of the family
        of which player 0 bets a jack with probability 1/6.
        """
        state, legal = self._state, _legal(self._state)
        if self._name == "kuhn_poker" and str(self._game) == "kuhn_poker()":
            bet = kuhn_bet(state.information_state_string(state.current_player()))
            return {"Pass": 1 - bet, "Bet": bet}
        kind = self._game.get_type()
        if kind.information != pyspiel.GameType.Information.PERFECT_INFORMATION or self._game.max_chance_outcomes():
            return None
        try:
            sign = 1 if state.current_player() == 0 else -1
            values = {name: sign * self._value(state.child(number)) for name, number in legal.items()}
        except (_TooLargeError, RecursionError):
            return None
        best = [name for name in values if values[name] == max(values.values())]
        return {name: (name in best) / len(best) for name in values}

    def _draw(self) -> None:
        """Play chance moves until it is a player's turn."""
        while self._state.is_chance_node():
            actions, probabilities = zip(*self._state.chance_outcomes(), strict=True)
            self._state.apply_action(self._chance.choices(actions, probabilities)[0])

    def _now(self) -> StepResult:
        player = self._state.current_player()
        return StepResult(
            observation=self._seen(player),
            state_key=digest(player, str(self._state)),
            admissible=list(_legal(self._state)),
            extra={"role": ROLES[player]},
            task=self._task(player),
        )

    def _task(self, player: int) -> str:
        return f"{self._rules} You are {ROLES[player]}."

    def _seen(self, player: int) -> str:
        text = getattr(self._state, self._view)(player).rstrip()
        if self._name == "kuhn_poker" and text[:1] in ("0", "1", "2"):
            moves = ", ".join({"p": "Pass", "b": "Bet"}[move] for move in text[1:]) or "none"
            return f"Your card: {CARDS[int(text[0])]}. Moves so far: {moves}."
        return text or "The game begins."


def _legal(state: Any) -> dict[str, int]:
    """The legal actions of the player to move: name -> OpenSpiel's number."""
    player = state.current_player()
    return {state.action_to_string(player, number).strip(" ;"): number for number in state.legal_actions()}


def kuhn_bet(information: str, bluff: float = 1 / 6) -> float:
    """How often an equilibrium bets in an information state of Kuhn poker: the card, 0 to 2, and moves p and b.

    ``bluff``: how often player 0 bets a jack, 0 to 1/3; all of these are equilibria with the value -1/18 for player 0.
    """
    card, moves = int(information[0]), information[1:]
    return {
        "": (bluff, 0.0, 3 * bluff),
        "p": (1 / 3, 0.0, 1.0),
        "b": (0.0, 1 / 3, 1.0),
        "pb": (0.0, bluff + 1 / 3, 1.0),
    }[moves][card]


class _TooLargeError(Exception):
    pass


def _minimax(most: int) -> Callable[[Any], float]:
    """The value of a state for player 0, by a search of at most ``most`` different states."""
    values: dict[str, float] = {}

    def value(state: Any) -> float:
        if state.is_terminal():
            return state.returns()[0]
        key = f"{state.current_player()} {state}"
        if key not in values:
            if len(values) >= most:
                raise _TooLargeError
            best = max if state.current_player() == 0 else min
            values[key] = best(value(state.child(number)) for number in state.legal_actions())
        return values[key]

    return value
