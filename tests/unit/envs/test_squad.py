"""How answers are read before they are compared."""

from __future__ import annotations

import asyncio

import pytest

from verl_turnkey.envs.rewards import RewardStep, compose
from verl_turnkey.envs.rewards.r1_router import answer_reward
from verl_turnkey.envs.rewards.stepsearch import token_f1
from verl_turnkey.envs.squad import f1, normalize, same


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (" The  Red-Car, an   'A'! ", "redcar"),  # punctuation goes first: what is left of 'A' is an article
        ("The  Cat's, an A-team!", "cats ateam"),
        ("anthem of a theatre", "anthem of theatre"),
        ("the", ""),
        ("3.14", "3.14"),
        ("-5", "-5"),
        ("\u22125", "-5"),
        ("It is 7.0.", "it is 7"),
        ("(1,000.50)", "1000.5"),
        ("$5, or 5%!", "5 or 5"),
        ("10:30, 5-6 and 1.2.3", "1030 56 and 123"),
        ("in 1999.", "in 1999"),
        (".5", "0.5"),
        ("-0.0", "0"),
        ("1" * 400, "1" * 400),
    ],
)
def test_lower_case_without_punctuation_and_articles(text, read):
    assert normalize(text) == read


@pytest.mark.parametrize(
    ("gold", "right", "wrong"),
    [
        ("A", ["A", "a", "A.", "(A)", "**A**"], [".", "?!", "the", "B", ""]),
        ("?!", ["?!"], ["A", ".", ""]),
        ("the A", ["the A"], ["."]),
        ("3.14", ["3.14", "3.140", "(3.14)"], ["314", "3,14"]),
        ("-5", ["-5", "-5.0"], ["5"]),
        ("7", ["7", "7.0", "the 7"], ["70", "-7", "7.5"]),
        ("1000", ["1,000", "1000.0"], ["1,00"]),
        ("The Eiffel Tower", ["eiffel tower."], ["eiffel"]),
    ],
)
def test_every_comparison_of_answers_is_the_same(gold, right, wrong):
    def of_component(answer: str, match: str) -> float:
        step = RewardStep(observation="", action=answer, extra={"gold_answer": gold})
        composed = compose([{"name": "answer", "match": match}])
        return asyncio.run(composed.run([step])).rewards[-1]

    for answer in right:
        assert same(answer, gold), answer
        assert f1(answer, gold) == token_f1(answer, [gold]) == of_component(answer, "f1") == 1.0
        assert answer_reward(answer, [gold]) == of_component(answer, "em") == 1.0
    for answer in wrong:
        assert not same(answer, gold), answer
        assert of_component(answer, "em") == 0.0
        assert token_f1(answer, [gold]) < 1.0
