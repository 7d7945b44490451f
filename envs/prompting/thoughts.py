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


def opens_thoughts(prompt: str) -> bool:
    """Whether the end of a prompt opens the model's thoughts, as the templates of DeepSeek-R1 and Qwen3.5 do."""
    return any(prompt.rstrip().endswith(family.begin) for family in FAMILIES)
