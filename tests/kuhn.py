"""Kuhn poker for two roles of one episode: hidden cards, which nobody but their holder may read in a prompt."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium

ROLES = ("first", "second")
CARDS = ("jack", "queen", "king")
SHOWDOWN = {"check check": 1, "bet call": 2, "check bet call": 2}
"""moves of a hand -> what the higher card wins"""
FOLDED = {"bet fold": 1, "check bet fold": -1}
"""moves of a hand -> what the first player wins"""


class Kuhn(gymnasium.Env[str, str]):
    """Each ``hand`` draws two of three cards; an observation shows the mover's own, marked as the mover's.

    ``wrong``: answers as no environment may, for tests of what is refused. ``declares``: whether it says its roles.
    ``early``: what each move pays the second instead. ``together``: both succeed, and there is no outcome by role.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": [], "thread_safe": True, "deepcopy": True, "roles": ROLES}

    def __init__(
        self, hands: int = 1, wrong: str = "", declares: bool = True, early: float = 0.0, together: bool = False
    ) -> None:
        self.hands, self.wrong, self.early, self.together = hands, wrong, early, together
        if not declares:
            self.metadata = {"render_modes": []}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.hand, self.won = 0, 0
        self.deal()
        return self.view(), {"task": "Bet on the higher card.", **self.info()}

    def deal(self, cards: tuple[str, ...] = ()) -> None:
        order = self.np_random.permutation(3)[:2]
        self.cards, self.moves = cards or tuple(CARDS[n] for n in order), list[str]()

    @property
    def mover(self) -> int:
        return len(self.moves) % 2

    @property
    def choices(self) -> list[str]:
        return ["call", "fold"] if "bet" in self.moves else ["check", "bet"]

    def view(self) -> str:
        return f"Hand {self.hand}: the {self.cards[self.mover]}, marked {ROLES[self.mover]}. Moves: {self.moves}"

    def info(self) -> dict[str, Any]:
        role = "third" if self.wrong == "role" and self.moves else ROLES[self.mover]
        key = f"{self.hand} {self.cards[self.mover]} {self.moves}"
        return {"state_key": key, "admissible": self.choices, "extra": {"role": role}}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action not in self.choices:
            return self.view(), 0.0, False, False, {**self.info(), "invalid": True}
        self.moves.append(action)
        moves = " ".join(self.moves)
        if moves in SHOWDOWN or moves in FOLDED:
            higher = CARDS.index(self.cards[0]) > CARDS.index(self.cards[1])
            self.won += FOLDED[moves] if moves in FOLDED else SHOWDOWN[moves] * (1 if higher else -1)
            self.hand += 1
            if self.hand == self.hands:
                return "The game is over.", 0.0, True, False, {**self.info(), **self.ended()}
            self.deal()
        return self.view(), 0.0, False, False, {**self.info(), **self.paid(action)}

    def paid(self, action: str) -> dict[str, Any]:
        """A turn's reward for both, where a test asks for it: a quarter to the one who made the other decide."""
        if self.early:
            return {"rewards": {"second": self.early}}
        mover, other = ROLES[1 - self.mover], ROLES[self.mover]
        return {"rewards": {mover: 0.25, other: -0.25}} if self.wrong == "" and action == "bet" else {}

    def ended(self) -> dict[str, Any]:
        if self.together:
            return {"success": True}
        outcome = {"first": self.won, "second": -self.won}
        odd = {"outcome": {"first": 1, "third": -1}, "number": {"first": "much"}, "list": [1, -1]}
        return {"outcome": odd.get(self.wrong, outcome)}


if "tests/Kuhn-v0" not in gymnasium.registry:
    gymnasium.register("tests/Kuhn-v0", entry_point=Kuhn)
