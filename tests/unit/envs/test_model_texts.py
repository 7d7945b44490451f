"""Thoughts in what models write, and answers compared by their words."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_turnkey.envs.model_texts import (
    FAMILIES,
    after_first_thoughts,
    after_thoughts,
    close_thoughts,
    f1,
    normalize,
    opens_thoughts,
    same,
)
from verl_turnkey.envs.rewards import RewardStep, compose
from verl_turnkey.envs.rewards.r1_router import answer_reward
from verl_turnkey.envs.rewards.stepsearch import token_f1

HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "opened", "answer"),
    [
        ("go", False, "go"),
        ("<think>a</think>go", False, "go"),
        ("<think>a</think>go<think>b</think>stay", False, "stay"),
        ("<think>a <think> b</think>go", False, "go"),
        ("a</think>go", False, "go"),
        ("a</think>go", True, "go"),
        ("<think>a</think>go", True, "go"),  # written again after the prompt's
        ("<think>a</think>write </think>", False, "write </think>"),
        ("go", True, None),
        ("<think>a", False, None),
        ("<think>a</think>go<think>", False, None),
        ("◁think▷a◁/think▷go", False, "go"),
        ("[THINK]a[/THINK]go", False, "go"),
        ("<|START_THINKING|>a<|END_THINKING|>go", False, "go"),
        ("[THINK]a", False, None),
        ("<|channel>thought\na<channel|>go", False, "go"),
        ("◁think▷a</think>", False, None),
        (HARMONY.format("a") + "go", False, "<|start|>assistant<|channel|>final<|message|>go"),
        ("<|channel|>analysis<|message|>a", False, None),
        ("go<|end|>", False, "go<|end|>"),  # of models that end their turns with it
    ],
)
def test_after_thoughts(text, opened, answer):
    assert after_thoughts(text, opened) == answer


PIECES = ["go", " ", *(mark for family in FAMILIES for mark in family[:2])]


@given(st.lists(st.sampled_from(PIECES)), st.booleans())
def test_what_is_left_is_an_end_of_the_text_without_whole_thoughts(pieces, opened):
    text = "".join(pieces)
    answer = after_thoughts(text, opened)
    assert answer is None or (text.endswith(answer) and "<think>" not in answer)


@pytest.mark.parametrize(
    ("prompt", "opens"),
    [
        ("<｜Assistant｜><think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("say <think> and end<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_opens_thoughts(prompt, opens):
    assert opens_thoughts(prompt) is opens


@pytest.mark.parametrize(
    ("prompt", "begun", "closing"),
    [
        ("<｜Assistant｜><think>\n", "The answer is ", "\n</think>\n\n"),
        ("<｜Assistant｜><think>\n", "\n</think>\n\nThe answer is ", ""),
        ("<|im_start|>assistant\n", "The answer is ", ""),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "The answer is ", ""),
        ("<|turn>model\n<|channel>thought\n", "The answer is ", "<channel|>"),
    ],
)
def test_an_answer_follows_the_end_of_the_thoughts(prompt, begun, closing):
    assert close_thoughts(prompt, begun) == closing
    whole = prompt + closing + begun
    assert (after_thoughts(whole) or "").endswith("The answer is ")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>3?</think>\nScore: 7", "\nScore: 7"),
        ("\n<think>Score: 3", None),
        ("It wrote <think> and stopped.\nScore: 7", "It wrote <think> and stopped.\nScore: 7"),
        ("<think>a</think>It wrote <think>.\nScore: 7", "It wrote <think>.\nScore: 7"),
        ("3?</think>\nScore: 7", "3?</think>\nScore: 7"),
    ],
)
def test_after_first_thoughts(text, answer):
    assert after_first_thoughts(text) == answer


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
