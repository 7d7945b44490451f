"""Which tokens of a prompt are an observation's, and which the chat template put around it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from verl_turnkey.envs.answers import Answer

MARK = "\ue000"
"""a text that no environment writes"""


def marked(seen: Answer) -> Iterator[Answer]:
    """``seen`` with :data:`MARK` in the place of its observation, or of the results of its calls one by one."""
    results = list(seen.info.get("results", ()))
    for i, result in enumerate(results):
        changed = [*results[:i], {**result, "content": MARK}, *results[i + 1 :]]
        yield replace(seen, info={**seen.info, "results": changed})
    if not results:
        yield replace(seen, observation=MARK)


def spans(tokenizer: Any, ids: Sequence[int], others: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """Where ``ids`` differ from each of ``others``, in which one text is another: (first, end), counted from the end.

    A token with letters of the template is the template's. Whitespace around a text does not matter: templates strip
    it, and tokens begin with it. A text of whitespace alone has no span.
    """

    def length(tokens: int) -> int:
        """Characters of the first ``tokens`` ids."""
        return len(_decode(tokenizer, ids[:tokens]))

    whole, number, result = _decode(tokenizer, ids), range(len(ids) + 1), []
    for other in (_decode(tokenizer, variant) for variant in others):
        start = _alike(whole, other)
        end = len(whole) - _alike(whole[start:][::-1], other[start:][::-1])
        text = whole[start:end]
        start, end = start + len(text) - len(text.lstrip()), end - len(text) + len(text.rstrip())
        if start >= end:
            continue
        # Of a character in several tokens the first ones are decoded as one, too: hence the last of equal lengths.
        first, last = (bisect_right(number, bound, key=length) - 1 for bound in (start, end))
        first += bool(whole[length(first) : start].strip())
        last += length(last) < end and not whole[end : length(last + 1)].strip()
        if first < last:
            result.append((first - len(ids), last - len(ids)))
    return result


def _alike(first: str, other: str) -> int:
    """Number of characters with which both begin."""
    pairs = enumerate(zip(first, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(other)))


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
