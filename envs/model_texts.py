"""What models write: how they mark their thoughts, and how two answers are compared.

Answers are compared by the words of SQuAD's evaluation, and numbers as numbers: the search environment and the rewards
``answer``, ``stepsearch`` and ``r1_router`` share it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from decimal import Decimal
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


_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_AROUND = re.compile(r"^[^\w.+\-\u2212]+|(?:(?<=\d)\.|[^\w.])+$")
_NUMBER = re.compile(r"[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+\u2212]?\.\d+")
_LONGEST = 30
"""digits of a number; longer ones are words"""


def normalize(text: str) -> str:
    """Lower case, no punctuation, no articles, single spaces (Rajpurkar et al. 2016, ``evaluate-v1.1.py``).

    It reads 3.14 as 314 and -5 as 5; here a number keeps its sign and its decimals, and 7.0 is 7.
    """
    return " ".join(_ARTICLES.sub(" ", _with_articles(text)).split())


def words(text: str) -> list[str]:
    """The words of :func:`normalize`; with articles where nothing else is left (``(A)``), or as written (``?!``)."""
    return normalize(text).split() or _with_articles(text).split() or text.split()


def same(answer: str, gold: str) -> bool:
    """Whether both have the same words."""
    return words(answer) == words(gold)


def f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the words, repeated words counted as often as they occur."""
    answer_words, gold_words = Counter(words(answer)), Counter(words(gold))
    common = (answer_words & gold_words).total()
    return 2 * common / (answer_words.total() + gold_words.total()) if common else 0.0


def _with_articles(text: str) -> str:
    return " ".join(map(_plain, text.lower().split()))


def _plain(word: str) -> str:
    """A word without punctuation; a number, punctuation around it aside, in its shortest form."""
    number = _AROUND.sub("", word)
    if len(number) > _LONGEST or not _NUMBER.fullmatch(number):
        return word.translate(_PUNCTUATION)
    value = Decimal(number.replace(",", "").replace("\u2212", "-"))
    return f"{value.normalize() + 0:f}"
