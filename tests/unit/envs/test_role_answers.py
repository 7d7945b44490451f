"""Environments of several roles: what they may answer, and the game of the tests."""

from fractions import Fraction
from itertools import permutations
from types import SimpleNamespace

import kuhn
import pytest

from verl_turnkey.envs import EnvironmentKwargsError
from verl_turnkey.envs.answers import Answer, read_reset, read_step
from verl_turnkey.envs.base import declared_roles

ROLES = ("first", "second")
ALPHA = Fraction(1, 5)
#: The equilibria of Kuhn poker, one for each ALPHA from 0 to 1/3: card and moves so far -> how often to bet or to call.
EQUILIBRIUM = {
    ("jack", ""): ALPHA,
    ("queen", ""): 0,
    ("king", ""): 3 * ALPHA,
    ("jack", "check"): Fraction(1, 3),
    ("queen", "check"): 0,
    ("king", "check"): 1,
    ("jack", "bet"): 0,
    ("queen", "bet"): Fraction(1, 3),
    ("king", "bet"): 1,
    ("jack", "check bet"): 0,
    ("queen", "check bet"): ALPHA + Fraction(1, 3),
    ("king", "check bet"): 1,
}


def value(cards: tuple[str, str], moves: tuple[str, ...] = ()) -> Fraction:
    """What the first player may expect, by playing all ways to go on."""
    expected, passive = Fraction(0), {"check": "bet", "fold": "call"}
    env = kuhn.Kuhn()
    env.reset(seed=0)
    env.deal(cards)
    for move in moves:
        _, _, terminated, _, info = env.step(move)
        if terminated:
            assert info["outcome"]["second"] == -info["outcome"]["first"]
            return Fraction(info["outcome"]["first"])
    active = Fraction(EQUILIBRIUM[cards[len(moves) % 2], " ".join(moves)])
    for move in env.choices:
        share = 1 - active if move in passive else active
        expected += share * value(cards, (*moves, move)) if share else 0
    return expected


def test_the_game_has_its_known_value():
    """Kuhn 1950: -1/18 for the first player."""
    deals = list(permutations(kuhn.CARDS, 2))
    assert sum(map(value, deals)) / len(deals) == Fraction(-1, 18)


def step(info, terminated=False, roles=ROLES):
    return read_step(("seen", 0.0, terminated, False, info), roles)


@pytest.mark.parametrize(
    ("info", "roles", "faults"),
    [
        ({"extra": {"role": "first"}}, ROLES, []),
        ({"extra": {"role": "third"}}, ROLES, ["must say whose move it is, not 'third'"]),
        ({}, ROLES, ["must say whose move it is, not None: metadata['roles'] declares 'first', 'second'"]),
        ({"extra": {"role": ["first"]}}, (), ["must be a text or a number, not list ['first']"]),
        ({"extra": {"role": 0}}, (), []),
        ({"extra": {"role": "first"}, "rewards": {"third": 1}}, ROLES, ["info['rewards'] pays 'third'"]),
        ({"extra": {"role": "first"}, "rewards": 1.0}, ROLES, ["info['rewards'] must be a dict of role and number"]),
        (
            {"extra": {"role": "first"}, "outcome": {"first": None}},
            ROLES,
            ["['first'] must be a finite number"],
        ),
        ({"extra": {"role": "first"}, "outcome": {"first": 1}}, (), ["pays 'first': declare the roles in the class's"]),
        # Keys of an environment's own, which knows of no roles.
        ({"outcome": "won", "rewards": {"speed": 0.5}}, (), []),
        ({"extra": {"role": "agent"}, "rewards": {"speed": 0.5}}, (), []),
    ],
)
def test_faults_of_answers(info, roles, faults):
    messages = [fault.message for fault in step(info, roles=roles).faults]
    assert len(messages) == len(faults)
    assert all(words in message for words, message in zip(faults, messages, strict=True))
    if "outcome" not in info and "rewards" not in info:
        assert [fault.message for fault in read_reset(("seen", info), roles).faults] == messages


def test_the_end_may_leave_open_whose_move_it_is():
    assert step({"outcome": {"first": 1}}, terminated=True).faults == []


def test_what_a_step_pays():
    answer = step({"extra": {"role": "first"}, "rewards": {"first": 0.25}, "outcome": {"first": 1, "second": -1}})
    assert isinstance(answer, Answer)
    assert answer.paid == {"first": 1.25, "second": -1.0}
    assert step({"extra": {"role": "first"}}).paid == {}


@pytest.mark.parametrize("roles", ["first", ["a", "a"], ["a", ""], ["a", 1], {"a": 1}])
def test_roles_that_cannot_be_declared(roles):
    env = SimpleNamespace(unwrapped=SimpleNamespace(metadata={"roles": roles}))
    with pytest.raises(EnvironmentKwargsError, match=r"metadata\['roles'\] must be a list of different texts, not"):
        declared_roles(env)


@pytest.mark.parametrize(("metadata", "roles"), [(None, ()), ({}, ()), ({"roles": ["a", "b"]}, ("a", "b"))])
def test_declared_roles(metadata, roles):
    assert declared_roles(SimpleNamespace(unwrapped=SimpleNamespace(metadata=metadata))) == roles
