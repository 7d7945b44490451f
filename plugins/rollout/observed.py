"""Which tokens of a prompt are an observation's, and which the chat template put around it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any


def spans(tokenizer: Any, ids: Sequence[int], texts: Sequence[str]) -> list[tuple[int, int]]:
    """Where the tokens of each of ``texts`` are in ``ids``, which hold them in this order: (first, end) from the end.

    A token with letters of the template is the template's. Whitespace around a text does not matter: templates strip
    it, and tokens begin with it. A text that the template rewrote is left out.
    """

    def length(tokens: int) -> int:
        """Characters of the first ``tokens`` ids."""
        return len(_decode(tokenizer, ids[:tokens]))

    whole, number, place, result = _decode(tokenizer, ids), range(len(ids) + 1), 0, []
    for text in map(str.strip, texts):
        start = whole.find(text, place)
        if text and start >= 0:
            place = start + len(text)
            # Of a character in several tokens the first ones are decoded as one, too: hence the last of equal lengths.
            first, end = (bisect_right(number, bound, key=length) - 1 for bound in (start, place))
            first += bool(whole[length(first) : start].strip())
            end += length(end) < place and not whole[place : length(end + 1)].strip()
            if first < end:
                result.append((first - len(ids), end - len(ids)))
    return result


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
