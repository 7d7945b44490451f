"""What a turn says after its thoughts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_turnkey.envs.prompting.thoughts import FAMILIES, after_thoughts, opens_thoughts

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
