"""Episodes of a run on the terminal: turns with what was seen, said and done, and their credit.

Texts of a run are not trusted: control characters and marks of direction become visible symbols, and none is read as
markup.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from unicodedata import category

import numpy as np

from verl_turnkey.envs.model_texts import split_thoughts
from verl_turnkey.plugins.view.conversations import Conversation, conversations, extremes
from verl_turnkey.plugins.view.headline import headline
from verl_turnkey.plugins.view.join import LoggedRun
from verl_turnkey.plugins.view.pack import full_credit, pictures_in, task_name

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

MOST = 600
"""characters of a text, where several episodes are shown"""
LABEL = 13
NO_TEXTS = "the log lacks texts of this episode: turnkey.log.keep_texts sets for how many steps they are kept"
OUTCOMES = {"solved": ("✓ solved", "green"), "unsolved": ("✗ not solved", ""), "failed": ("! failed", "red")}
PLUS, MINUS = "#56b4e9", "#e69f00"
TONES = {
    "-3": ("▼", f"bold {MINUS}"), "-2": ("▼", MINUS), "-1": ("▼", f"dim {MINUS}"), "0": ("○", ""),
    "1": ("▲", f"dim {PLUS}"), "2": ("▲", PLUS), "3": ("▲", f"bold {PLUS}"),
}  # fmt: skip
"""as on the page: blue and up, vermilion and down"""


def show(run: LoggedRun, rows: np.ndarray, limit: int, console: Console) -> None:
    """Print the headline and at most ``limit`` of the episodes ``rows``, the best first; one alone with whole texts."""
    from rich.text import Text

    console.print(Text.assemble((plain(run.name, True), "bold"), ": ", headline(run)))
    for note in run.notes:
        console.print(Text(plain(note, True), "yellow"))
    some = extremes(run, rows, limit)
    number = f"{len(rows)} episode{'' if len(rows) == 1 else 's'}"
    which = "the best and the worst" if len(some) > 1 else "the best"
    some_of = f"{len(some)} of {number}, {which} by return; --limit {len(rows)} shows all"
    console.print(Text(some_of if len(some) < len(rows) else number, "dim"))
    by_key = {talk.episode["episode"]: talk for talk in conversations(run, some)}
    for row in some:  # in this order, and not by step
        console.print()
        for text in lines(by_key[run.episodes["episode"][row]], full_credit(run), whole=len(some) == 1):
            console.print(text, soft_wrap=True)


def lines(talk: Conversation, full: float, *, whole: bool = False) -> Iterator[Text]:
    """An episode. ``full``: the credit from which on a colour is full."""
    from rich.text import Text

    most = math.inf if whole else MOST
    episode, (outcome, style) = talk.episode, OUTCOMES[talk.outcome]
    facts = [f"step {episode.get('global_step', '?')}", *(["validation"] if episode.get("validation") else [])]
    facts += [f"{name} {value}" for name in ("seed", "branch") if (value := episode.get(name))]
    yield Text.assemble((plain(episode["episode"], True), "bold"), f"  {'  '.join(facts)}  ", (outcome, style))
    if "note" in episode:
        yield _labelled("note", episode["note"], math.inf, "yellow")
    start = talk.turns[0] if talk.turns else {}
    names = [task_name(str(episode.get("task", episode.get("env", "")))), start.get("task_text")]
    yield _labelled("task", "\n".join(dict.fromkeys(filter(None, names))), most)
    if not talk.has_texts:
        yield _labelled("", NO_TEXTS, most, "dim")
    if "first_observation" in start:
        yield _labelled("environment", start["first_observation"], most)
    elif "prompt_tail" in start:  # of an earlier version
        yield _labelled("prompt", start["prompt_tail"], most)
    for turn in talk.turns:
        others = json.loads(turn.get("opponents", "[]"))
        yield from (_other(other, most) for other in others if "before" in other)
        yield _head(turn, full)
        if drawn := pictures_in(turn.get("images")):
            yield _labelled("pictures", " ".join(map(in_words, drawn)), most, "dim")
        if "response" in turn:
            thoughts, answer = split_thoughts(turn["response"])
            if thoughts:
                yield _labelled("thoughts", thoughts.strip(), most, "dim italic")
            yield _labelled("model", (answer or "").strip(), most)
        yield _labelled("action", turn.get("action", "none"), most, "" if "action" in turn else "dim")
        yield from (_other(other, most) for other in others if "before" not in other)
        if "observation" in turn:
            yield _labelled("environment", turn["observation"], most)
    number = episode.get("turns", len(talk.turns))
    ending = [outcome, f"after {number} turn{'' if number == 1 else 's'}"]
    ending += ["at a limit"] if episode.get("truncated") else []
    ending += [f"return {episode['composed_return']:.6g}"] if "composed_return" in episode else []
    ending += [plain(str(episode["failed"]))] if "failed" in episode else []
    yield _labelled("outcome", ", ".join(ending), math.inf, style)


def _head(turn: dict[str, Any], full: float) -> Text:
    """Number, credit, reward of a turn, and why it is invalid."""
    from rich.text import Text

    head = Text.assemble((f"turn {turn['turn']}".ljust(LABEL), "bold"))
    if "advantage" in turn:
        glyph, style = TONES[level(turn["advantage"], full)]
        head.append(f"{glyph} {turn['advantage']:+.2f}", style)
    else:
        head.append(f"◌ no credit: {turn['no_credit']}", "dim")
    reward = turn.get("composed_reward", turn.get("reward"))
    head.append("" if reward is None else f"  reward {reward:.6g}")
    head.append(f"  penalty {turn['penalty']:.6g}" if turn.get("penalty") else "")
    if not turn.get("valid"):
        head.append(f"  invalid: {plain(turn.get('parse_note', 'no reason is logged'), True)}", "red")
    return head


def _other(turn: dict[str, Any], most: float) -> Text:
    """A turn of a role that the policy does not play."""
    action = turn.get("action") or f"invalid ({turn['invalid']})"
    return _labelled("opponent", f"{turn['role']} ({turn['by']}): {action}", most)


def _labelled(label: str, text: str, most: float, style: str = "") -> Text:
    """A text beside its label, its further lines below each other."""
    from rich.text import Text

    cut = text if len(text) <= most else f"{text[: int(most)]} … ({len(text):,} characters)"
    return Text.assemble((label.ljust(LABEL), "dim"), (plain(cut).replace("\n", "\n" + " " * LABEL), style))


def in_words(picture: str) -> str:
    """A picture's size and the beginning of its digest."""
    size, _, digest = picture.partition("-")
    return f"[picture {size} {digest[:6]}]"


def level(credit: float, full: float) -> str:
    """-3 to 3, as in the page's colours."""
    share = max(-1.0, min(1.0, credit / full))
    step = math.ceil(abs(share) * 3 - 0.1)
    return str(-step if share < 0 else step)


def plain(text: str, one_line: bool = False) -> str:
    """An untrusted text with symbols for control characters, and codes for what is invisible or turns the direction."""
    kept = "" if one_line else "\n"
    text = text.replace("\r\n", "\n").expandtabs(4)
    return "".join(c if c.isprintable() or c in kept or category(c) == "Zs" else _symbol(c) for c in text)  # Zs: spaces


def _symbol(character: str) -> str:
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else f"⟦{code:x}⟧"
