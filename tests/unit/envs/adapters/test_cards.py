"""Gym Cards: the rules of each game, what solves it, and that the picture shows what the words say."""

import hashlib
import random
import sys
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache
from itertools import permutations, product
from typing import Any

import pytest

from verl_turnkey.envs import MissingPackageError, make
from verl_turnkey.envs.adapters.cards import Card, points, solution, stands, value

NAMES = ("NumberLine", "EZPoints", "Points24", "BlackJack")
POINTS = NAMES[1:3]


def started(name: str, seed: int = 0, **kwargs: Any) -> Any:
    env = make(f"turnkey/{name}-v0", kwargs).unwrapped
    env.reset(seed=seed)
    return env


def dealt(name: str, ranks: list[int], **kwargs: Any) -> Any:
    """A game with these cards; those of BlackJack: two of the dealer's, two of the player's, and what is drawn."""
    env = started(name, **kwargs)
    cards = [(rank, "hearts") for rank in ranks]
    if name == "BlackJack":
        env.deck[: len(cards)] = cards
    else:
        env.lay(cards)
    return env


def played(env: Any, actions: list[str]) -> list[tuple]:
    """Reward, terminated, truncated and success of each step."""
    answers = [env.step(action) for action in actions]
    return [(*answer[1:4], answer[4]["success"]) for answer in answers]


# --- every game -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", [{}, {"images": True, "size": 80}], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_the_oracle_wins_where_it_has_a_plan(name, kwargs):
    solved = 0
    for seed in range(40):
        env = started(name, seed, **kwargs)
        if plan := env.oracle():
            solved += 1
            answers = played(env, plan)
            assert answers[-1] == ({"NumberLine": 1, "BlackJack": 1}.get(name, 10), True, False, True)
            assert all(answer == (0.0, False, False, False) for answer in answers[:-1])
    assert solved == 40 if name in ("NumberLine", "EZPoints") else 10 < solved < 40


@pytest.mark.parametrize("name", NAMES)
def test_the_picture_shows_the_state_and_the_words_do_not(name):
    """Two states have one picture if and only if they have one text; so have equal seeds, in any instance."""
    drawn, written = {}, {}
    for rollout in range(60):
        rng, seed = random.Random(rollout), rollout // 3
        pair = [make(f"turnkey/{name}-v0", {"images": images}) for images in (True, False)]
        (seen, info), (text, other) = (env.reset(seed=seed) for env in pair)
        over = False
        while True:
            (picture,) = info["images"]
            assert (picture.shape, picture.dtype, seen) == ((300, 300, 3), "uint8", "The picture shows the game.")
            assert info["state_key"] == other["state_key"]
            text = text.removeprefix(next((part for part in text.split(". ") if "left that" in part), "")).strip(". ")
            image = hashlib.sha256(picture.tobytes()).hexdigest()
            assert drawn.setdefault(image, text) == text
            assert written.setdefault(text, image) == image
            if over:
                break
            action = rng.choice(info["admissible"])
            (seen, *_, info), (text, _, *ended, other) = (env.step(action) for env in pair)
            over = any(ended)
    assert len(drawn) > 20


@pytest.mark.parametrize("name", NAMES)
def test_suits_ranks_and_the_length_of_the_line_are_drawn(name):
    kwargs = {"images": True, "size": 64}
    if name == "NumberLine":
        starts = [started(name, seed, max_position=20, **kwargs) for seed in range(60)]
        states = {(env.position, env.target): env._now().images[0].tobytes() for env in starts}
        assert len({*states.values()}) == len(states) > 40
        return
    pictures = set()
    for rank, suit in product(range(1, 14), ("hearts", "diamonds", "spades", "clubs")):
        env = dealt(name, [5, 5, 5, 5][: 2 if name == "EZPoints" else 4], **kwargs)
        if name == "BlackJack":
            env.deck[0] = (rank, suit)
        else:
            env.lay([(rank, suit), *env.cards[1:]])
        pictures.add(env._now().images[0].tobytes())
    assert len(pictures) == 52


def test_the_hidden_card_is_not_shown_and_counts_for_the_key():
    first, second = (dealt("BlackJack", [9, hidden, 10, 5], images=True)._now() for hidden in (2, 8))
    assert (first.images[0] == second.images[0]).all()
    assert first.state_key != second.state_key
    assert dealt("BlackJack", [9, 2, 10, 5]).describe() == dealt("BlackJack", [9, 8, 10, 5]).describe()


def test_what_is_no_action_costs_one_and_changes_nothing():
    for name, pays in product(NAMES, ("native", "success")):
        env = make(f"turnkey/{name}-v0", {"reward": pays, "images": True})
        _, start = env.reset(seed=1)
        _, reward, *ends, info = env.step("11" if name in POINTS else "+1")
        assert (reward, ends, info["invalid"]) == (-1.0 if pays == "native" else 0.0, [False, False], True)
        assert info["state_key"] == start["state_key"]
        assert (info["images"][0] == start["images"][0]).all()


@pytest.mark.parametrize(("name", "limit"), [*zip(NAMES, (10, 7, 22, 20), strict=True)])
def test_the_steps_of_each_game(name, limit):
    for max_steps, expected in ((None, limit), (3, 3), (1000, limit)):
        env = started(name, max_steps=max_steps)
        assert env.turn_limit == expected
        ends = [answer[1:3] for answer in played(env, ["nothing"] * expected)]
        assert ends == [(False, False)] * (expected - 1) + [(False, True)]
    assert started("EZPoints", max_steps=3).oracle() is None


def test_pictures_without_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert make("turnkey/BlackJack-v0").reset(seed=0)[0]
    with pytest.raises(MissingPackageError, match="pip install pillow"):
        make("turnkey/BlackJack-v0", {"images": True})


# --- the number line --------------------------------------------------------------------------------------------------


def test_steps_towards_the_target_and_away_from_it():
    env = started("NumberLine")
    env.position, env.target = 1, 3
    assert [answer[0] for answer in played(env, ["-", "-", "+"])] == [-1.0, -1.0, 0.0]
    assert env.position == 1  # the second step was against the end of the line
    assert played(env, ["+", "+"]) == [(0.0, False, False, False), (1.0, True, False, True)]
    env = started("NumberLine", reward="success")
    env.position, env.target = 0, 1
    assert played(env, ["-", "+"]) == [(0.0, False, False, False), (1.0, True, False, True)]


def test_every_start_with_another_target_is_dealt():
    envs = [started("NumberLine", seed) for seed in range(300)]
    assert {(env.position, env.target) for env in envs} == {*permutations(range(6), 2)}
    assert {started("NumberLine", seed, max_position=1).position for seed in range(20)} == {0, 1}


# --- formulas ---------------------------------------------------------------------------------------------------------

ENDS_BADLY = (-1.0, True, False, False)


@pytest.mark.parametrize(
    ("name", "ranks", "formula", "end"),
    [
        ("EZPoints", [5, 7], "5 + 7 =", (10.0, True, False, True)),
        ("EZPoints", [7, 5], "5 + 7 =", (10.0, True, False, True)),
        ("EZPoints", [2, 12], "10 + 2 =", (10.0, True, False, True)),
        ("EZPoints", [5, 7], "5 * 7 =", ENDS_BADLY),
        ("EZPoints", [5, 7], "5 + =", ENDS_BADLY),
        ("EZPoints", [5, 7], "=", ENDS_BADLY),
        ("Points24", [3, 8, 1, 1], "3 * 8 =", ENDS_BADLY),  # not every card
        ("Points24", [3, 8, 1, 1], "3 * 8 * 1 * 1 =", (10.0, True, False, True)),
        ("Points24", [2, 4, 1, 1], "2 4 * 1 * 1 =", ENDS_BADLY),  # no 24
        ("Points24", [3, 3, 2, 1], "3 * * 3 - 2 - 1 =", ENDS_BADLY),  # no power
        ("Points24", [10, 4, 12, 4], "10 / / 4 * 10 + 4 =", ENDS_BADLY),  # no 2 without remainder
        ("Points24", [3, 8, 1, 1], "3 ( 8 ) * 1 * 1 =", ENDS_BADLY),
        ("Points24", [3, 8, 1, 1], "( 3 * 8 * 1 * 1 =", ENDS_BADLY),
        ("Points24", [3, 3, 8, 8], "8 / ( 3 - 8 / 3 ) =", (10.0, True, False, True)),  # 23.999999999999996 as floats
        ("Points24", [6, 6, 1, 1], "6 / ( 1 - 1 ) + 6 =", ENDS_BADLY),
        ("Points24", [2, 8, 4, 1], "- ( 2 - 8 ) * 4 * 1 =", (10.0, True, False, True)),
    ],
)
def test_formulas(name, ranks, formula, end):
    answers = played(dealt(name, ranks), formula.split())
    assert answers[-1] == end
    assert {*answers[:-1]} <= {(0.0, False, False, False)}


@pytest.mark.parametrize("name", POINTS)
def test_a_number_of_no_card_or_used_twice_costs_one_and_is_not_written(name):
    env = dealt(name, [5, 7] if name == "EZPoints" else [5, 7, 1, 1])
    observation, reward, *ends, info = env.step("9")
    assert observation.startswith("No card is left that counts 9. Cards: 5 of hearts, 7 of hearts")
    assert (reward, ends, info["invalid"], env.formula) == (-1.0, [False, False], False, [])
    assert [answer[0] for answer in played(env, ["5", "5", "+", "7"])] == [0.0, -1.0, 0.0, 0.0]
    assert env.formula == ["5", "+", "7"]
    twice = dealt(name, [6, 6] if name == "EZPoints" else [6, 6, 6, 6])
    assert [answer[0] for answer in played(twice, ["6", "+", "6"])] == [0.0] * 3


@pytest.mark.parametrize(
    ("name", "places", "last"), [("EZPoints", 6, "="), ("EZPoints", 6, "+"), ("Points24", 21, "=")]
)
def test_the_last_step_is_too_late(name, places, last):
    """As published: a right formula counts until its places are full, not afterwards."""
    right = ["6", "+", "6"] if name == "EZPoints" else ["6", "+", "6", "+", "6", "+", "6"]
    wasted = ["9"] * (places - len(right))
    env = dealt(name, [6] * (2 if name == "EZPoints" else 4))
    answers = played(env, [*wasted, *right, last])
    assert answers[-2] == (0.0, False, False, False)
    assert answers[-1] == (-1.0, last == "=", last != "=", False)
    env = dealt(name, [6] * (2 if name == "EZPoints" else 4))
    assert played(env, [*wasted[1:], *right, "="])[-1] == (10.0, True, False, True)
    # a limit of the user's own is no full formula
    env = dealt(name, [6] * (2 if name == "EZPoints" else 4), max_steps=len(right) + 1)
    assert played(env, [*right, "="])[-1] == (10.0, True, False, True)


def test_face_cards_count_ten_or_more():
    env = dealt("Points24", [1, 11, 12, 13])
    assert env.numbers == ["1", "10", "10", "10"]
    assert env.actions == (*map(str, range(1, 11)), *"+-*/()=")
    env = dealt("Points24", [1, 11, 12, 13], treat_face_cards_as_10=False)
    assert env.numbers == ["1", "11", "12", "13"]
    assert played(env, ["13", "10"])[-1][0] == -1.0
    assert played(env, ["-", "1", "*", "12", "+", "(", "11"])[-1] == (0.0, False, False, False)
    assert make("turnkey/EZPoints-v0").reset(seed=0)[1]["admissible"] == [*map(str, range(1, 11)), *"+*="]


def test_each_deal_of_ezpoints_is_one_of_the_published():
    """The first card is 2 to king, and the other makes 12 with it, as a sum or as a product."""
    pairs = {tuple(rank for rank, _ in started("EZPoints", seed).cards) for seed in range(1500)}
    sums = {(rank, 12 - min(rank, 10)) for rank in range(2, 14)}
    expected = sums | {(rank, 12 // rank) for rank in (2, 3, 4, 6)}
    assert pairs == expected | {pair[::-1] for pair in expected}


def makes(numbers: tuple[Fraction, ...]) -> Iterator[Fraction]:
    """Every number that a formula of ``numbers`` makes, by a split into two parts."""
    if len(numbers) == 1:
        yield numbers[0]
    for chosen in range(1, 2 ** len(numbers) - 1):
        left = tuple(number for i, number in enumerate(numbers) if chosen >> i & 1)
        right = tuple(number for i, number in enumerate(numbers) if not chosen >> i & 1)
        for a, b in product({*makes(left)}, {*makes(right)}):
            yield from (a + b, a - b, a * b, *([a / b] if b else []))


def test_the_solver_finds_a_formula_where_there_is_one_and_none_elsewhere():
    solved = 0
    for seed in range(25):
        numbers = [int(number) for number in started("Points24", seed).numbers]
        formula = solution(numbers, 24, "+-*/")
        assert (formula is not None) == (24 in {*makes(tuple(map(Fraction, numbers)))})
        if formula:
            solved += 1
            assert value(formula) == 24
            assert sorted(int(token) for token in formula if token.isdigit()) == sorted(numbers)
    assert 10 < solved < 25
    assert solution([1, 1, 1, 1], 24, "+-*/") is None
    assert value(solution([3, 3, 8, 8], 24, "+-*/") or []) == 24


def test_solvable_deals_only_what_can_be_solved():
    assert any(started("Points24", seed).oracle() is None for seed in range(20))
    envs = [started("Points24", seed, solvable=True) for seed in range(20)]
    assert all(env.oracle() for env in envs)
    assert len({env.cards for env in envs}) == 20


# --- BlackJack --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "actions", "reward", "words"),
    [
        ([10, 9, 10, 10], ["stand"], 1, "The dealer has 10 of hearts, 9 of hearts: 19. You win."),
        ([10, 9, 10, 8], ["stand"], -1, "You lose."),
        ([10, 9, 10, 9], ["stand"], 0, "It is a draw."),
        ([10, 6, 2, 3, 10], ["stand"], 1, "10 of hearts, 6 of hearts, 10 of hearts: 26. You win."),  # the dealer busts
        ([10, 6, 2, 3, 1], ["stand"], -1, "1"),  # 17 with the ace as 1: the dealer stops
        ([6, 1, 10, 9, 10], ["stand"], 1, "6 of hearts, ace of hearts: 17. You win."),  # 17 with an ace as 11, too
        ([10, 9, 10, 6, 5], ["hit", "stand"], 1, "You have 10 of hearts, 6 of hearts, 5 of hearts: 21. "),
        ([10, 9, 10, 6, 6], ["hit"], -1, "22. The dealer has 10 of hearts, 9 of hearts: 19. You lose."),
        ([10, 6, 10, 6, 6], ["hit"], -1, "10 of hearts, 6 of hearts: 16. You lose."),  # who need not draw any more
        ([10, 9, 1, 5, 10, 5], ["hit", "hit", "stand"], 1, "5 of hearts: 21. "),  # the ace counts 1 after all
        ([10, 1, 13, 1], ["stand"], 0, "with an ace as 11. The dealer has 10 of hearts, ace of hearts: 21. It is"),
    ],
)
def test_hands(ranks, actions, reward, words):
    env = dealt("BlackJack", ranks)
    answers = [env.step(action) for action in actions]
    observation, *outcome, info = answers[-1]
    assert (outcome, info["success"]) == ([float(reward), True, False], reward > 0)
    assert words in observation
    assert all(answer[1:4] == (0.0, False, False) for answer in answers[:-1])


def test_a_hand_in_words():
    env = dealt("BlackJack", [12, 9, 1, 6])
    assert env.describe() == (
        "You have ace of hearts, 6 of hearts: 17, with an ace as 11. The dealer shows queen of hearts."
    )


def test_the_longest_hand_fits_into_the_steps_and_the_picture():
    env = dealt("BlackJack", [10, 10, *[1] * 24], images=True)
    answers = played(env, ["hit"] * 20)
    assert answers == [(0.0, False, False, False)] * 19 + [(-1.0, True, False, False)]
    assert points(env.player) == (22, False)


VALUES = [*range(1, 10), *[10] * 4]


@lru_cache(None)
def dealers(total: int, ace: bool) -> dict[int, float]:
    """Chances of what the dealer ends with, by counting each card of the endless deck; 0: bust."""
    final = total + 10 * (ace and total <= 11)
    if final >= 17:
        return {final if final <= 21 else 0: 1.0}
    chances: dict[int, float] = {}
    for card in VALUES:
        for end, chance in dealers(total + card, ace or card == 1).items():
            chances[end] = chances.get(end, 0.0) + chance / 13
    return chances


@lru_cache(None)
def worth(total: int, ace: bool, upcard: int) -> tuple[float, float]:
    """The expected reward of standing, and of hitting and then doing what is best."""
    if total > 21:
        return -1.0, -1.0
    final, standing = total + 10 * (ace and total <= 11), 0.0
    for hidden in VALUES:
        for end, chance in dealers(upcard + hidden, 1 in (upcard, hidden)).items():
            standing += chance / 13 * ((final > end) - (final < end))
    return standing, sum(max(worth(total + card, ace or card == 1, upcard)) for card in VALUES) / 13


def test_basic_strategy_is_the_best_there_is():
    compared = 0
    for upcard, first, second, third in product(range(1, 11), range(1, 11), range(1, 11), range(11)):
        hand: list[Card] = [(rank, "clubs") for rank in (first, second, third) if rank]
        total = sum(rank for rank, _ in hand)
        if total <= 21:
            standing, hitting = worth(total, (1, "clubs") in hand, upcard)
            assert stands(hand, (upcard, "clubs")) == (standing >= hitting), (hand, upcard)
            compared += 1
    assert compared > 5000


def test_cards_are_drawn_with_the_odds_of_an_endless_deck():
    decks = [card for seed in range(200) for card in started("BlackJack", seed).deck]
    tens = sum(rank >= 10 for rank, _ in decks) / len(decks)
    assert tens == pytest.approx(4 / 13, abs=0.02)
    assert len({*decks}) == 52
