"""Gym Cards: NumberLine, EZPoints, Points24 and BlackJack, in words or drawn.

The rules are those of RL4VLM (Zhai et al. 2024, "Fine-tuning large vision-language models as decision-making agents via
reinforcement learning"). docs/envs/cards.md says where its code and these games differ.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from itertools import cycle, permutations
from typing import Any, ClassVar

import numpy as np

from verl_turnkey.envs.base import StepResult, TextEnv, check, digest, is_count, words
from verl_turnkey.envs.errors import MissingPackageError

REWARDS = ("native", "success")
Card = tuple[int, str]
"""rank from 1, the ace, to 13, and suit"""
RANKS = ("ace", *map(str, range(2, 11)), "jack", "queen", "king")
SUITS = {
    "hearts": "ellipse 0 0 55 55, ellipse 45 0 100 55, polygon 5 40 95 40 50 100",
    "diamonds": "polygon 50 0 95 50 50 100 5 50",
    "spades": "ellipse 0 35 50 80, ellipse 50 35 100 80, polygon 5 50 50 0 95 50, polygon 50 40 70 100 30 100",
    "clubs": "ellipse 25 0 75 50, ellipse 0 35 50 85, ellipse 50 35 100 85, polygon 50 30 70 100 30 100",
}
"""how each suit is drawn: shapes with their corners in percent of a square"""
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


class Board:
    """A square picture. Coordinates are shares of its side, from the upper left corner."""

    def __init__(self, side: int, color: str) -> None:
        from PIL import Image, ImageDraw, ImageFont

        self.image, self._side, self._font = Image.new("RGB", (side, side), color), side, ImageFont.load_default
        self._pen = ImageDraw.Draw(self.image)

    def shape(self, kind: str, color: str, *corners: float) -> None:
        getattr(self._pen, kind)([corner * self._side for corner in corners], fill=color)

    def text(self, x: float, y: float, text: str, height: float, color: str = "white", anchor: str = "lm") -> None:
        font = self._font(max(1.0, height * self._side))
        self._pen.text((x * self._side, y * self._side), text, color, font, anchor)

    def card(self, x: float, y: float, width: float, card: Card | None) -> None:
        """A card with the upper left corner (x, y), seven fifths as high as wide; None: its back."""
        edge, right, bottom = width / 30, x + width, y + 1.4 * width
        self.shape("rectangle", "gray", x, y, right, bottom)
        self.shape("rectangle", "white" if card else "navy", x + edge, y + edge, right - edge, bottom - edge)
        if card:
            rank, suit = card
            color = "red" if suit in ("hearts", "diamonds") else "black"
            name = RANKS[rank - 1] if 1 < rank < 11 else RANKS[rank - 1][0].upper()
            self.text(x + 2 * edge, y + width / 4, name, width / 2.5, color)
            for kind, *corners in map(str.split, SUITS[suit].split(", ")):
                start = cycle((x + 0.3 * width, y + 0.7 * width))
                self.shape(kind, color, *(next(start) + width * int(corner) / 200 for corner in corners))


class _Game(TextEnv):
    """What the games share.

    Args:
        reward: ``native``: the published one. ``success``: 1.0 for solving the task and 0.0 otherwise.
        images: show the game as a picture; the words are then the same in every step.
        size: side of pictures in pixels, 64 to 1024.
        max_steps: steps after which the episode is truncated; at most the game's own limit, which None stands for.
    """

    metadata: ClassVar[dict[str, Any]] = {**TextEnv.metadata, "thread_safe": True, "memory_mb": 1, "deepcopy": True}
    limit: int
    actions: Sequence[str]
    task: str
    color = "#35654d"
    """of a picture's background"""

    def __init__(
        self, reward: str = "native", images: bool = False, size: int = 300, max_steps: int | None = None
    ) -> None:
        super().__init__(max_steps)
        check(reward in REWARDS, "reward", f"one of {', '.join(REWARDS)}", reward)
        check(isinstance(images, bool), "images", "true or false", images)
        check(is_count(size) and 64 <= size <= 1024, "size", "an integer from 64 to 1024", size)
        self.max_steps = min(self.limit, max_steps or self.limit)
        self._success_only, self._side = reward == "success", size if images else 0
        if images and find_spec("PIL") is None:
            raise MissingPackageError("images=true draws with Pillow, which is not installed: pip install pillow")

    def begin(self, seed: int) -> tuple[StepResult, str]:
        self.deal(random.Random(seed))
        return self._now(), self.task

    def act(self, action: str) -> StepResult:
        action = words(action)
        if action not in self.actions:  # or nonsense would pay more than a game that is lost
            return replace(self.refused(), reward=0.0 if self._success_only else -1.0)
        return self.play(action)

    def oracle(self) -> list[str] | None:
        plan = self.plan()
        return plan if plan and len(plan) <= (self.max_steps or self.limit) else None

    def deal(self, rng: random.Random) -> None:
        """Start an episode."""

    def play(self, action: str) -> StepResult:
        """What one of ``actions`` leads to."""
        raise NotImplementedError

    def plan(self) -> list[str] | None:
        """Actions that solve the episode from its start."""
        raise NotImplementedError

    def state(self) -> tuple[Any, ...]:
        """The state, hidden parts included."""
        raise NotImplementedError

    def describe(self) -> str:
        """What the agent may see, in words."""
        raise NotImplementedError

    def draw(self, board: Board) -> None:
        """The same as a picture."""

    def _now(self, event: str = "", reward: float = 0.0, success: bool = False, terminated: bool = False) -> StepResult:
        text, pictures = event + self.describe(), []
        if self._side:
            board = Board(self._side, self.color)
            self.draw(board)
            text, pictures = "The picture shows the game.", [np.asarray(board.image)]
        paid, key = float(success) if self._success_only else reward, digest(*self.state())
        return StepResult(text, key, self.actions, paid, terminated, success=success, images=pictures)


class NumberLineText(_Game):
    """Move along a number line to the target.

    Args:
        max_position: the line goes from 0 to this number, 1 to 20; twice as many steps are allowed.
        reward, images, size, max_steps: as in all four games.

    ``native`` pays 1 at the target, -1 for a step that does not lead closer to it, else 0. Actions are ``-`` and ``+``.
    The seed determines start and target, which differ. ``state_key`` is a hash of both numbers.
    """

    actions = ("-", "+")
    color = "white"

    def __init__(
        self,
        max_position: int = 5,
        reward: str = "native",
        images: bool = False,
        size: int = 300,
        max_steps: int | None = None,
    ) -> None:
        check(is_count(max_position) and max_position <= 20, "max_position", "an integer from 1 to 20", max_position)
        self.last, self.limit = max_position, 2 * max_position
        super().__init__(reward, images, size, max_steps)
        self.task = f"Move along a line from 0 to {max_position} to the target: + adds 1 to your number, - subtracts 1."
        if images:
            self.task += " You are the blue dot, the target is below the red arrow."

    def deal(self, rng: random.Random) -> None:
        self.position, self.target = rng.sample(range(self.last + 1), 2)

    def play(self, action: str) -> StepResult:
        before = abs(self.target - self.position)
        self.position = min(max(self.position + (1 if action == "+" else -1), 0), self.last)
        after = abs(self.target - self.position)
        return self._now("", -1.0 if after >= before else float(not after), not after, not after)

    def plan(self) -> list[str]:
        return ["+" if self.target > self.position else "-"] * abs(self.target - self.position)

    def state(self) -> tuple[Any, ...]:
        return self.position, self.target

    def describe(self) -> str:
        return f"You are at {self.position}. The target is {self.target}."

    def draw(self, board: Board) -> None:
        step = 0.84 / self.last
        board.shape("rectangle", "black", 0.08, 0.595, 0.92, 0.605)
        for number in range(self.last + 1):
            x = 0.08 + number * step
            board.shape("rectangle", "black", x - 0.003, 0.56, x + 0.003, 0.64)
            board.text(x, 0.74, str(number), min(0.1, 0.7 * step), "black", "mm")
        here, there = (0.08 + number * step for number in (self.position, self.target))
        board.shape("polygon", "red", there, 0.52, there - 0.05, 0.38, there + 0.05, 0.38)
        board.shape("ellipse", "blue", here - 0.04, 0.56, here + 0.04, 0.64)


class EZPointsText(_Game):
    """Make 12 of two cards: a formula that grows by a number or sign in each step, with each card once.

    Args:
        reward, images, size, max_steps: as in all four games.

    ``native`` pays 10 for a formula that makes 12, -1 for another one, for the number of no card that is left and for
    the step after the sixth, else 0. Actions are the numbers from ``1`` to ``10``, ``+``, ``*`` and ``=``. The seed
    determines the cards; every deal has a solution. ``state_key`` is a hash of cards and formula.
    """

    signs, highest, aim, limit = "+*", 10, 12, 7

    def __init__(
        self, reward: str = "native", images: bool = False, size: int = 300, max_steps: int | None = None
    ) -> None:
        super().__init__(reward, images, size, max_steps)
        self.actions = (*map(str, range(1, self.highest + 1)), *self.signs, "=")
        self.task = (
            f"Make {self.aim} of the cards. In each step add a number or a sign to the formula: the number of every "
            f"card once, and {' '.join(self.signs)}. Then = ends it. An ace counts 1, a jack {min(11, self.highest)}, "
            f"a queen {min(12, self.highest)}, a king {self.highest}."
        )

    def deal(self, rng: random.Random) -> None:
        rank = rng.randint(2, 13)
        number = min(rank, 10)
        other = 12 // number if 12 % number == 0 and rng.random() < 0.5 else 12 - number
        self.lay([(dealt, rng.choice([*SUITS])) for dealt in rng.sample([rank, other], 2)])

    def lay(self, cards: Sequence[Card]) -> None:
        self.cards, self.formula = tuple(cards), list[str]()
        self.numbers = [str(min(rank, self.highest)) for rank, _ in cards]

    def play(self, action: str) -> StepResult:
        used = [token for token in self.formula if token.isdigit()]
        late = self._steps + 1 >= self.limit
        if action.isdigit() and used.count(action) >= self.numbers.count(action):
            return self._now(f"No card is left that counts {action}. ", -1.0)
        self.formula.append(action)
        if action != "=":
            return self._now("", -1.0 if late else 0.0)
        won = len(used) == len(self.cards) and value(self.formula[:-1]) == self.aim and not late
        return self._now("", 10.0 if won else -1.0, won, True)

    def plan(self) -> list[str] | None:
        formula = solution([int(number) for number in self.numbers], self.aim, [s for s in self.signs if s in SIGNS])
        return formula and [*formula, "="]

    def state(self) -> tuple[Any, ...]:
        return self.cards, self.formula

    def describe(self) -> str:
        return f"Cards: {in_words(self.cards)}. Formula: {' '.join(self.formula) or 'empty'}"

    def draw(self, board: Board) -> None:
        width = 0.88 / max(len(self.cards), 3)
        for number, card in enumerate(self.cards):
            board.card(0.04 + number * (width + 0.015), 0.1, width, card)
        board.text(0.04, 0.66, "Formula:", 0.07)
        for row in (0, 1):
            board.text(0.04, 0.78 + 0.12 * row, " ".join(self.formula[11 * row :][:11]), 0.065)


class Points24Text(EZPointsText):
    """The 24 game: make 24 of four cards.

    Args:
        treat_face_cards_as_10: whether jack, queen and king count 10, else 11, 12 and 13.
        solvable: deal only cards of which 24 can be made; else any four, as published.
        reward, images, size, max_steps: as in all four games.

    As EZPoints, with ``-``, ``/``, ``(`` and ``)`` too; the step after the 21st costs 1. ``oracle`` tries every
    formula, and gives None where there is none.
    """

    signs, aim, limit = "+-*/()", 24, 22

    def __init__(
        self,
        treat_face_cards_as_10: bool = True,
        solvable: bool = False,
        reward: str = "native",
        images: bool = False,
        size: int = 300,
        max_steps: int | None = None,
    ) -> None:
        for name, switch in (("treat_face_cards_as_10", treat_face_cards_as_10), ("solvable", solvable)):
            check(isinstance(switch, bool), name, "true or false", switch)
        self.highest, self._solvable = 10 if treat_face_cards_as_10 else 13, solvable
        super().__init__(reward, images, size, max_steps)

    def deal(self, rng: random.Random) -> None:
        while True:
            self.lay([(rng.randint(1, 13), rng.choice([*SUITS])) for _ in range(4)])
            if not self._solvable or self.plan():
                return


class BlackJackText(_Game):
    """Get closer to 21 than the dealer, who draws up to 17, without going over it; the deck never ends.

    Args:
        reward, images, size, max_steps: as in all four games.

    ``native`` pays 1 for a win, -1 for a loss, 0 for a draw. Actions are ``stand`` and ``hit``. The seed determines the
    order of the cards. ``state_key`` is a hash of both hands, the hidden card included. ``oracle`` plays basic strategy
    (:func:`stands`), and gives None where that does not win.
    """

    limit, actions = 20, ("stand", "hit")
    task = (
        "Get closer to 21 than the dealer, but not over it. hit takes a card, stand ends your turn. Then the dealer "
        "takes cards up to 17 or more. Jack, queen and king count 10, an ace counts 11, or 1 where 11 is too much."
    )

    def deal(self, rng: random.Random) -> None:
        # The player takes 22 cards at most, all aces; the dealer far fewer than the rest.
        self.deck = [(rng.randint(1, 13), rng.choice([*SUITS])) for _ in range(48)]
        self.hits, self.over = 0, False

    def play(self, action: str) -> StepResult:
        self.hits += action == "hit"
        self.over = action == "stand" or points(self.player)[0] > 21
        outcome = self.outcome() if self.over else 0
        return self._now("", float(outcome), outcome > 0, self.over)

    @property
    def player(self) -> list[Card]:
        return self.deck[2 : 4 + self.hits]

    @property
    def dealer(self) -> list[Card]:
        """The dealer's hand at the end; before, the agent sees its first card."""
        hand, rest = self.deck[:2], iter(self.deck[4 + self.hits :])
        while points(self.player)[0] <= 21 and points(hand)[0] < 17:
            hand.append(next(rest))
        return hand

    def outcome(self) -> int:
        mine, theirs = points(self.player)[0], points(self.dealer)[0]
        return -1 if mine > 21 else 1 if theirs > 21 else (mine > theirs) - (mine < theirs)

    def plan(self) -> list[str] | None:
        while not stands(self.player, self.deck[0]):
            self.hits += 1
        plan = [*["hit"] * self.hits, "stand"] if self.outcome() > 0 else None
        self.hits = 0
        return plan

    def state(self) -> tuple[Any, ...]:
        return self.deck[:2], self.player, self.over

    def describe(self) -> str:
        total, soft = points(self.player)
        hand = f"You have {in_words(self.player)}: {total}{', with an ace as 11' if soft else ''}. "
        if not self.over:
            return f"{hand}The dealer shows {in_words(self.deck[:1])}."
        result = {1: "You win.", 0: "It is a draw.", -1: "You lose."}[self.outcome()]
        return f"{hand}The dealer has {in_words(self.dealer)}: {points(self.dealer)[0]}. {result}"

    def draw(self, board: Board) -> None:
        dealer = self.dealer if self.over else [self.deck[0], None]
        for y, name, hand in ((0.06, "Dealer", dealer), (0.56, "You", self.player)):
            board.text(0.04, y, name, 0.07)
            for number, card in enumerate(hand):
                board.card(0.04 + number * min(0.235, 0.7 / (len(hand) - 1)), y + 0.06, 0.22, card)


def in_words(cards: Sequence[Card]) -> str:
    return ", ".join(f"{RANKS[rank - 1]} of {suit}" for rank, suit in cards)


def value(formula: Sequence[str]) -> Any:
    """The exact value of a formula, whose numbers and signs are among ``actions``; None: it has none."""
    text = " ".join(f"F({token})" if token.isdigit() else token for token in formula)
    try:
        return eval(text, {"F": Fraction})
    except (SyntaxError, TypeError, ZeroDivisionError):
        return None


def solution(numbers: Sequence[int], target: int, signs: Sequence[str]) -> list[str] | None:
    """A formula with each of ``numbers`` once that makes ``target``: all orders and signs, in exact fractions."""

    def search(terms: list[tuple[Fraction, list[str]]]) -> list[str] | None:
        if len(terms) == 1:
            return terms[0][1] if terms[0][0] == target else None
        for i, j in permutations(range(len(terms)), 2):
            (a, left), (b, right) = terms[i], terms[j]
            rest = [term for k, term in enumerate(terms) if k not in (i, j)]
            for sign in signs:
                if sign == "/" and b == 0:
                    continue
                joined = (SIGNS[sign](a, b), ["(", *left, sign, *right, ")"])
                if formula := search([*rest, joined]):
                    return formula
        return None

    formula = search([(Fraction(number), [str(number)]) for number in numbers])
    return formula and formula[1:-1]


def points(hand: Sequence[Card]) -> tuple[int, bool]:
    """What a hand of BlackJack counts, and whether it has an ace that counts 11."""
    total = sum(min(rank, 10) for rank, _ in hand)
    soft = total <= 11 and any(rank == 1 for rank, _ in hand)
    return total + 10 * soft, soft


def stands(hand: Sequence[Card], upcard: Card) -> bool:
    """Whether basic strategy stands, the best that a player can do who sees one card of the dealer's."""
    (total, soft), dealer = points(hand), min(upcard[0], 10)
    if soft:
        return total >= 19 or (total == 18 and 2 <= dealer <= 8)
    return total >= 17 or (total >= 13 and 2 <= dealer <= 6) or (total == 12 and 4 <= dealer <= 6)
