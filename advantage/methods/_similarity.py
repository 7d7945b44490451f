"""Observation texts of steps, and clusters of similar texts that count as one state."""

from __future__ import annotations

from bisect import bisect_left
from difflib import SequenceMatcher
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_turnkey.advantage.batch import StepBatch
from verl_turnkey.advantage.columns import encode
from verl_turnkey.advantage.group_ops import Floats, Ints, joint_codes
from verl_turnkey.advantage.params import ConfigError


def step_texts(batch: StepBatch) -> list[Any]:
    """The observation text of each row: the column ``text`` when the batch has it, else the anchor; None for none."""
    if "text" in batch.given:
        return batch.text.tolist()
    ids = batch.ids["anchor"]
    return [ids[code] if code < len(ids) else None for code in batch.anchor.tolist()]


def within_images(batch: StepBatch, codes: Ints) -> Ints:
    """Codes (S,) of the parts of ``codes`` whose states were shown with the same images (``extra.images``, hashes).

    A text does not tell images apart: two states with different ones are never similar, whatever their texts.
    """
    if "extra.images" not in batch.given:
        return codes
    images, _ = encode("extra.images", ["" if key is None else key for key in batch.extra["images"]], False)
    return joint_codes(codes, images)[0]


def similar_states(batch: StepBatch, threshold: float) -> tuple[Ints, int]:
    """Codes (S,) of clusters of similar texts inside each group, and how many clusters there are.

    The greedy rule of verl-agent: the rows of a group are visited **in the order given**, and each joins the first
    cluster whose opening text ``rep`` has ``difflib.SequenceMatcher(None, text, rep).ratio() >= threshold``, or opens
    one. This is the one rule whose result depends on the order of the rows; the ratio is not symmetric either. A None
    text never matches, nor do states with different images (:func:`within_images`).

    Raises:
        ConfigError: a text is not a string.
    """
    texts = step_texts(batch)
    for row, text in enumerate(texts):
        if not isinstance(text, str | None):
            raise ConfigError(f"similarity compares texts, but row {row} has {text!r}: expected a string")
    codes = np.empty(len(batch), dtype=np.int64)
    n = 0
    group = within_images(batch, batch.group)
    order = np.argsort(group, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(group[order])) + 1):
        clusters = _Clusters(threshold)  # of one group at a time: those of all would not fit
        code_of: dict[str, int] = {}
        for row in rows.tolist():
            text = texts[row]
            # An equal text meets the same clusters in the same order, so it ends where the first one did.
            if text is not None and text not in code_of:
                code_of[text] = clusters.first_match(text, n)
            codes[row] = code = n if text is None else code_of[text]
            n = max(n, code + 1)
    return codes, n


class _Clusters:
    """The clusters of one group, with upper bounds that exclude most of them before difflib's ratio is computed."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.codes: list[int] = []
        self.references: list[Reference] = []
        self.lengths = np.zeros(8, dtype=np.int64)
        self.counts = [np.zeros((8, width), dtype=np.float32) for width in WIDTHS]
        self.subsequences = CommonSubsequences()

    def first_match(self, text: str, new: int) -> int:
        """The code of the first cluster that ``text`` is similar to; ``new``, for a cluster of its own, if none is."""
        n = len(self.codes)
        counts = [gram_counts(text, q, width) for q, width in enumerate(WIDTHS, 1)]
        total = len(text) + self.lengths[:n]

        possible = np.arange(n)
        for q, grams in enumerate(counts, 1):
            common = np.minimum(grams, self.counts[q - 1][possible]).sum(1)
            matched = (common + (q - 1) * (total[possible] + 1)) / (2 * q - 1)
            kept = 2.0 * matched >= self.threshold * total[possible] - 1e-6
            possible, common = possible[kept], common[kept]
        match = None
        if len(possible):  # the likeliest first: when it matches, only those before it are left to rule out
            likely = int(possible[np.argmax(common)])
            match = likely if self.references[likely].reached(text, self.threshold) else None
            possible = possible[possible != likely] if match is None else possible[possible < likely]
        if len(possible) and len(possible) > (possible[-1] + 1) / WORTH and len(text) <= LONG:
            matched = self.subsequences.lengths(text, possible)
            possible = possible[2.0 * matched >= self.threshold * total[possible] - 1e-6]
        for k in possible.tolist():
            if self.references[k].reached(text, self.threshold):
                return self.codes[k]
        if match is not None:
            return self.codes[match]
        self._open(text, counts, new)
        return new

    def _open(self, text: str, counts: list[NDArray[np.float32]], code: int) -> None:
        n = len(self.codes)
        if n == len(self.lengths):
            self.lengths = np.pad(self.lengths, (0, n))
            self.counts = [np.pad(table, ((0, n), (0, 0))) for table in self.counts]
        self.codes.append(code)
        self.lengths[n] = len(text)
        for table, grams in zip(self.counts, counts, strict=True):
            table[n] = grams
        self.references.append(Reference(text))
        self.subsequences.add(text)


WORTH = 6  # times that the longest common subsequence, taken for all clusters at once, costs less than a comparison

LONG = 2000  # characters beyond which it costs more than comparisons, which look at the rarer characters only


class CommonSubsequences:
    """Longest common subsequences of a text with many others at once: an upper bound of what difflib can match.

    The bit-parallel recurrence of Hyyro (2004), with the bits of all texts side by side in one integer: each text has a
    bit per character and one above them, which takes the carry.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []  # first bit and length of each text
        self.width = 0
        self.everywhere = 0  # the bits of all characters of all texts
        self.places: dict[str, int] = {}  # the bits of each character

    def add(self, text: str) -> None:
        places: dict[str, int] = {}
        for bit, character in enumerate(text):
            places[character] = places.get(character, 0) | 1 << bit
        for character, bits in places.items():
            self.places[character] = self.places.get(character, 0) | bits << self.width
        self.everywhere |= ((1 << len(text)) - 1) << self.width
        self.spans.append((self.width, len(text)))
        self.width += len(text) + 1

    def lengths(self, text: str, which: Ints) -> Floats:
        """Length of the longest common subsequence of ``text`` and each of the texts ``which``, in ascending order."""
        end = sum(self.spans[which[-1]])
        everywhere = self.everywhere & ((1 << end) - 1)  # those behind the last one need not be looked at
        row = everywhere
        for character in text:
            hits = row & self.places.get(character, 0)
            row = ((row + hits) | (row - hits)) & everywhere
        lengths = []
        for k in which.tolist():
            first, length = self.spans[k]
            lengths.append(length - ((row >> first) & ((1 << length) - 1)).bit_count())
        return np.array(lengths, dtype=np.float64)


# Upper bounds of how much two texts of T characters together can match, M characters in B blocks. Between two blocks
# lies an unmatched character of one of them, so B <= T - 2M + 1; a block of length b holds b - q + 1 runs of q
# characters, so the texts have c >= M - (q - 1) B such runs in common, wherever they stand. Hence
# M <= (c + (q - 1)(T + 1)) / (2q - 1). Runs are counted by a hash: a collision can only raise c.
WIDTHS = (128, 512, 512)  # of the tables of counts for q = 1, 2, 3


def gram_counts(text: str, q: int, width: int) -> NDArray[np.float32]:
    """How often each run of ``q`` characters occurs in ``text``, by hash: (width,)."""
    characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    runs = characters[: len(characters) - q + 1].copy() if len(characters) >= q else characters[:0]
    for k in range(1, q):
        runs = runs * np.uint32(1000003) + characters[k : len(characters) - q + 1 + k]
    return np.bincount(runs % width, minlength=width).astype(np.float32)


class Reference:
    """One text that others are compared with as difflib would: ``ratio()`` of ``SequenceMatcher(None, other, text)``.

    difflib splits both texts at their longest common block and goes on left and right of it; in texts of 200 characters
    and more it starts blocks at the rarer characters only. This class looks only at the positions of those, and stops
    as soon as the outcome is certain.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.positions = SequenceMatcher(b=text).b2j  # pyright: ignore[reportAttributeAccessIssue]

    def reached(self, other: str, threshold: float) -> bool:
        """Whether the ratio is at least ``threshold``.

        A part of lengths (a, b) adds at most min(a, b) matching characters: the sum over the open parts bounds the
        rest.
        """
        total = max(1, len(other) + len(self.text))
        seeds = [(i, self.positions[c]) for i, c in enumerate(other) if c in self.positions]
        matched, to_come = 0, min(len(other), len(self.text))
        parts = [(0, len(other), 0, len(self.text))]
        while 2.0 * matched / total < threshold:
            if not parts or 2.0 * (matched + to_come) / total < threshold:
                return False
            a_low, a_high, b_low, b_high = parts.pop()
            to_come -= min(a_high - a_low, b_high - b_low)
            a, b, size = self._longest_block(other, seeds, a_low, a_high, b_low, b_high)
            if size:
                matched += size
                for part in ((a_low, a, b_low, b), (a + size, a_high, b + size, b_high)):
                    if part[0] < part[1] and part[2] < part[3]:
                        parts.append(part)
                        to_come += min(part[1] - part[0], part[3] - part[2])
        return True

    def _longest_block(
        self, other: str, seeds: list[tuple[int, list[int]]], a_low: int, a_high: int, b_low: int, b_high: int
    ) -> tuple[int, int, int]:
        """Start in ``other``, start in ``text`` and length of the block that difflib chooses in these ranges.

        The longest run of seeds, the earliest of equals, then lengthened to both sides by any equal characters.
        """
        a, b, size = a_low, b_low, 0
        runs: dict[int, int] = {}  # length of the run of seeds that ends at this position of text
        before = -1
        for i, where in seeds[bisect_left(seeds, (a_low,)) :]:
            if i >= a_high:
                break
            longer: dict[int, int] = {}
            for j in where:
                if j >= b_high:
                    break
                if j >= b_low:
                    length = longer[j] = (runs.get(j - 1, 0) if i == before + 1 else 0) + 1
                    if length > size:
                        a, b, size = i - length + 1, j - length + 1, length
            runs, before = longer, i
        text = self.text
        while a > a_low and b > b_low and other[a - 1] == text[b - 1]:
            a, b, size = a - 1, b - 1, size + 1
        while a + size < a_high and b + size < b_high and other[a + size] == text[b + size]:
            size += 1
        return a, b, size
