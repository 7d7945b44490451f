"""Columns of a turn in HiPER's format: whether it switches, and which of its tokens belong to which decision."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any

from verl_turnkey.envs.prompting.actions import STREAMS, stream_spans, switches

FORMAT = "hiper"
COLUMNS = ("switch", *(f"{word}_{stream}" for word in ("has", "from", "to") for stream in STREAMS))
"""``from_...`` and ``to_...``: the first token of a decision within the turn, and the first one behind it"""


def stream_columns(ids: Sequence[int], text: str, tokenizer: Any) -> dict[str, int]:
    """:data:`COLUMNS` of the turn ``ids``, whose decoded text is ``text``."""
    ends = _Ends(ids, tokenizer)
    spans = stream_spans(text)
    columns = {"switch": int(switches(text))}
    for stream in STREAMS:
        start, end = spans.get(stream, (0, 0))
        # A token that two decisions share belongs to both.
        first, behind = (bisect_right(ends, start), bisect_left(ends, end) + 1) if end else (0, 0)
        columns |= {f"has_{stream}": int(end > 0), f"from_{stream}": first, f"to_{stream}": min(behind, len(ids))}
    return columns


class _Ends(Sequence[int]):
    """Where the text of each token ends, decoded only where a search looks."""

    def __init__(self, ids: Sequence[int], tokenizer: Any) -> None:
        self._ids, self._tokenizer = list(ids), tokenizer

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, at: Any) -> Any:
        return len(self._tokenizer.decode(self._ids[: at + 1], skip_special_tokens=True))
