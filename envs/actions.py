"""From what a model wrote to the action that it meant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from verl_turnkey.envs.errors import did_you_mean


@dataclass(frozen=True)
class ParsedAction:
    """``action`` as the environment spells it, or None with the ``reason`` when ``valid`` is false."""

    action: str | None
    valid: bool
    reason: str | None


def parse_action(text: str, fmt: str, admissible: Sequence[str] | None) -> ParsedAction:
    """Find the action in a model's turn. Never raises because of ``text``.

    Args:
        text: the decoded turn.
        fmt: ``plain`` (the first line), ``tags`` (the last ``<action>...</action>``) or ``boxed`` (the last
            ``\\boxed{...}``, braces balanced).
        admissible: when given, the action must be one of these; case and white space do not matter.
    """
    if fmt not in FORMATS:
        raise ValueError(
            f"unknown action format {fmt!r}.{did_you_mean(fmt, FORMATS)} "
            f"turnkey.rollout.action_format takes {', '.join(FORMATS)}"
        )
    found = FORMATS[fmt](text)
    action = " ".join(found.split()) if found is not None else None
    if action is None:
        return ParsedAction(None, False, f"no action in the format {fmt!r}")
    if not action:
        return ParsedAction(None, False, "the action is empty")
    if admissible is None:
        return ParsedAction(action, True, None)
    wanted = action.lower()
    for candidate in admissible:
        if " ".join(candidate.lower().split()) == wanted:
            return ParsedAction(candidate, True, None)
    return ParsedAction(None, False, f"not an admissible action: {action[:80]!r}")


def _plain(text: str) -> str:
    return text.strip().partition("\n")[0]


def _tags(text: str) -> str | None:
    end = text.rfind("</action>")
    start = text.rfind("<action>", 0, end) if end >= 0 else -1
    return text[start + len("<action>") : end] if start >= 0 else None


def _boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position]
    return None


FORMATS: dict[str, Callable[[str], str | None]] = {"plain": _plain, "tags": _tags, "boxed": _boxed}
