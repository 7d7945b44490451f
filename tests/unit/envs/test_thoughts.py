"""What a turn says after its thoughts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_turnkey.envs.thoughts import (
    FAMILIES,
    after_first_thoughts,
    after_thoughts,
    close_thoughts,
    opens_thoughts,
)

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
