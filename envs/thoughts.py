"""A model's thoughts: how models mark them, and what a turn says after them."""

from __future__ import annotations

import re
from typing import NamedTuple


class Marks(NamedTuple):
    """How a family of models marks its thoughts."""

    begin: str
    end: str
    answer: str = ""
    """what the model writes between its thoughts and its answer"""
    alone: bool = True
    """whether ``end`` marks nothing else, so that a turn may have it without ``begin``"""


FAMILIES = (
    Marks("<think>", "</think>"),
    Marks("<|channel>thought", "<channel|>", alone=False),
    Marks("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", alone=False),
    Marks("◁think▷", "◁/think▷"),
    Marks("<seed:think>", "</seed:think>"),
    Marks("[THINK]", "[/THINK]"),
    Marks("<|START_THINKING|>", "<|END_THINKING|>"),
)
_MARK = re.compile("|".join(re.escape(mark) for family in FAMILIES for mark in (family.begin, family.end)))


def after_thoughts(text: str, opened: bool = False) -> str | None:
    """What a turn says after its last thoughts; None if it ends before they do.

    A turn without thoughts says all of it. Where it closes thoughts that it never opened, the generation prompt had
    opened them.

    Args:
        text: the turn, with the model's control tokens.
        opened: the generation prompt opens the thoughts (see :func:`opens_thoughts`).
    """
    ends = {family.end for family in FAMILIES} if opened else set[str]()
    closed, start = False, 0
    for mark in _MARK.finditer(text):
        family = next(family for family in FAMILIES if mark[0] in family[:2])
        if ends:
            if mark[0] in ends:
                closed, start, ends = True, mark.end(), set()
        elif mark[0] == family.begin:
            ends = {family.end}
        elif family.alone and not closed:
            closed, start = True, mark.end()
    return None if ends else text[start:]


def split_thoughts(text: str, opened: bool = False) -> tuple[str | None, str | None]:
    """A turn's thoughts without their marks, None if it has none, and what :func:`after_thoughts` says of it."""
    answer = after_thoughts(text, opened)
    if answer == text and not opened:
        return None, answer
    before = text if answer is None else text[: len(text) - len(answer)]
    return _MARK.sub("", before), answer


def after_first_thoughts(text: str) -> str | None:
    """``text`` without the thoughts that it begins with; None if it ends before they do.

    For texts that may quote the marks of thoughts later on, as a judge does.
    """
    begun = next((family for family in FAMILIES if text.lstrip().startswith(family.begin)), None)
    if begun is None:
        return text
    _, closed, answer = text.partition(begun.end)
    return answer if closed else None


def opens_thoughts(prompt: str) -> bool:
    """Whether the end of a prompt opens the model's thoughts, as the templates of DeepSeek-R1 and Qwen3.5 do."""
    return _opened(prompt) is not None


def close_thoughts(prompt: str, begun: str) -> str:
    """What ends the thoughts that the end of a prompt opens, as chat templates end empty ones, before an answer.

    Args:
        prompt: its text, with the model's control tokens; "" is returned where it opens no thoughts.
        begun: how the turn begins; "" is returned where it ends the thoughts itself.
    """
    family = _opened(prompt)
    if family is None or family.end in begun:
        return ""
    return f"\n{family.end}\n\n" if family.alone else family.end + family.answer


def _opened(prompt: str) -> Marks | None:
    return next((family for family in FAMILIES if prompt.rstrip().endswith(family.begin)), None)
