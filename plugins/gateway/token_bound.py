"""How many tokens messages take at least, without tokenizing them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_turnkey.plugins.gateway.messages import Message

SHORT = 100_000
"""characters that are worth no look: they are tokenized in a moment"""
PART = 2**20
"""bytes that are looked at together"""


class TokenBound:
    """A lower bound of the tokens of messages, by the longest token that each byte occurs in.

    If byte ``b`` occurs in no token of more than ``m(b)`` bytes, the bytes of each token add at most 1 to the sum of
    ``1 / m(b)``. A vocabulary without single bytes may have a token for unknown text of any length: it has no bound.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, messages: Sequence[Message]) -> int:
        """The bound for a prompt. Of the model's own turns nothing counts: templates drop parts of them."""
        texts = [message.text for message in messages if message.role != "assistant"]
        return len(messages) if sum(map(len, texts)) <= SHORT else int(sum(map(self._tokens, texts)))

    @cached_property
    def _shares(self) -> NDArray[np.float64]:
        """1 / m(b) of each byte, (256,); 0 if it occurs in no token."""
        vocabulary = self._tokenizer.get_vocab()
        by_bytes = "\u0120" in vocabulary  # a space, in the alphabet of GPT-2
        shares, unseen = np.zeros(256), {*range(256)}
        if by_bytes or "<0x00>" in vocabulary:
            for token in sorted((_bytes(token, by_bytes) for token in vocabulary), key=len, reverse=True):
                new = unseen.intersection(token)
                shares[[*new]] = 1 / max(1, len(token))
                unseen -= new
        return shares

    def _tokens(self, text: str) -> float:
        text = unicodedata.normalize("NFC", text.strip())  # as some tokenizers and many templates do
        content = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
        parts = (content[start : start + PART] for start in range(0, len(content), PART))
        return float(sum(np.bincount(part, minlength=256) @ self._shares for part in parts))


def _alphabet() -> dict[int, int]:
    """The byte that each character of a byte-level vocabulary stands for, as in GPT-2."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printed]
    return {byte: byte for byte in printed} | {256 + n: byte for n, byte in enumerate(others)}


_ALPHABET = _alphabet()


def _bytes(token: str, by_bytes: bool) -> bytes:
    if by_bytes:
        try:
            return token.translate(_ALPHABET).encode("latin-1")
        except UnicodeEncodeError:  # an added token, which is plain text
            pass
    return token.replace("\u2581", " ").encode("utf-8", "replace")  # as SentencePiece writes spaces
