"""HiPER's format: in a turn the agent keeps or switches its subgoal, writes it, and acts (arXiv:2602.16165)."""

from __future__ import annotations

import re
from collections.abc import Mapping

STREAMS = ("switch", "subgoal", "action")
"""the three decisions of a turn, each between tags of its name"""
INSTRUCTION = (
    "Think about the situation. Then write <switch>SWITCH</switch> to take a new subgoal or <switch>KEEP</switch> to "
    "go on with yours, the subgoal inside <subgoal> </subgoal>, and one action inside <action> </action>."
)
_SWITCH = re.compile(r"<switch>\s*switch\s*</switch>", re.IGNORECASE)


def stream_spans(text: str) -> Mapping[str, tuple[int, int]]:
    """Characters of each decision, tags included: of the last ones with its tags. An absent one has no entry.

    Without tags of an action the whole text is the action, as in the released code.
    """
    spans = {}
    for stream in STREAMS:
        end = text.rfind(f"</{stream}>")
        start = text.rfind(f"<{stream}>", 0, end) if end >= 0 else -1
        if start >= 0:
            spans[stream] = (start, end + len(f"</{stream}>"))
    return {"action": (0, len(text)), **spans}


def switches(text: str) -> bool:
    """Whether the turn takes a new subgoal; one whose decision is missing or garbled keeps its own."""
    span = stream_spans(text).get("switch")
    return span is not None and _SWITCH.fullmatch(text[slice(*span)]) is not None
