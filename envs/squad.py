"""How answers are compared: by the words of SQuAD's evaluation, and numbers as numbers.

The search environment and the rewards ``answer``, ``stepsearch`` and ``r1_router`` share it.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from decimal import Decimal

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
    ours, theirs = Counter(words(answer)), Counter(words(gold))
    common = (ours & theirs).total()
    return 2 * common / (ours.total() + theirs.total()) if common else 0.0


def _with_articles(text: str) -> str:
    return " ".join(map(_plain, text.lower().split()))


def _plain(word: str) -> str:
    """A word without punctuation; a number, punctuation around it aside, in its shortest form."""
    number = _AROUND.sub("", word)
    if len(number) > _LONGEST or not _NUMBER.fullmatch(number):
        return word.translate(_PUNCTUATION)
    value = Decimal(number.replace(",", "").replace("\u2212", "-"))
    return f"{value.normalize() + 0:f}"
