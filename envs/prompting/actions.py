"""Parsing: from the text that a model wrote to the action in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.envs.base import words
from verl_turnkey.envs.model_texts import FAMILIES, after_thoughts
from verl_turnkey.envs.user_modules import load_function


class ControlTokens:
    """Turns control tokens in an environment's text into plain text.

    A chat template writes control tokens and texts into one string, so a page that holds ``<|im_end|>`` would otherwise
    end its own message. Control tokens are the tokenizer's special tokens, and of its other added tokens those that
    mark thoughts or stand in the chat template (``<think>``, ``<tool_call>``).
    """

    def __init__(self, tokenizer: Any) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        # Not all of them: the added tokens of some models include tags of HTML.
        template = str(getattr(tokenizer, "chat_template", None) or "")
        marks = {mark for family in FAMILIES for mark in (family.begin, family.end)}
        tokens = {
            str(token)
            for token in added
            if token.special
            or re.match(r"[<\[{].*[|｜]|[|｜].*[>\]}]$", str(token))
            or (re.match(r"[<\[{◁].*[>\]}▷]$", str(token)) and (str(token) in marks or str(token) in template))
        }
        tokens |= {str(token) for token in getattr(tokenizer, "all_special_tokens", ())}
        tokens = {token for token in tokens if len(token) > 1 and token.strip()}
        self._pattern = re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)))
        self._any = bool(tokens)

    def plain(self, text: str) -> str:
        """``text`` with a space after the first character of each control token in it."""
        return self._pattern.sub(lambda match: f"{match[0][0]} {match[0][1:]}", text) if self._any else text


STREAMS = ("switch", "subgoal", "action")
"""the three decisions of a turn, each between tags of its name"""
INSTRUCTION = (
    "Think about the situation. Then write <switch>SWITCH</switch> to take a new subgoal or <switch>KEEP</switch> to "
    "go on with yours, the subgoal inside <subgoal> </subgoal>, and one action inside <action> </action>."
)
_SWITCH = re.compile(r"<switch>\s*switch\s*</switch>", re.IGNORECASE)


def _last_tags(text: str, name: str) -> tuple[int, int] | None:
    """Start and end of the last ``<name>...</name>``, tags included."""
    end = text.rfind(f"</{name}>")
    start = text.rfind(f"<{name}>", 0, end) if end >= 0 else -1
    return (start, end + len(f"</{name}>")) if start >= 0 else None


def stream_spans(text: str) -> Mapping[str, tuple[int, int]]:
    """Characters of each decision, tags included: of the last ones with its tags. An absent one has no entry.

    Without tags of an action the whole text is the action, as in the released code.
    """
    spans = {stream: span for stream in STREAMS if (span := _last_tags(text, stream))}
    return {"action": (0, len(text)), **spans}


def switches(text: str) -> bool:
    """Whether the turn takes a new subgoal; one whose decision is missing or garbled keeps its own."""
    span = _last_tags(text, "switch")
    return span is not None and _SWITCH.fullmatch(text[slice(*span)]) is not None


TOOL_CALL, TOOLS = "json", "tools"
CALLS = (TOOL_CALL, TOOLS)
"""the formats that only the agent loop can parse, since the model's tokenizer and chat template define them: a call of
the one tool ``act``, and calls of the environment's own tools"""

INSTRUCTIONS = {
    "plain": "Answer with your next action and nothing else.",
    "tags": "Think about the situation inside <think> </think>. Then write one action inside <action> </action>.",
    "hiper": INSTRUCTION,
    "boxed": "Think about the situation. Then write one action as \\boxed{action}.",
    TOOL_CALL: "Think about the situation. Then call the tool with one action.",
    TOOLS: "Think about the situation. Then call the tools that you need, or answer in words.",
}
"""what the field ``{format}`` of a prompt template says; for a format of your own see :func:`instruction_of`"""

KEY = "turnkey.rollout.action_format"


@dataclass(frozen=True)
class Call:
    """A call of a tool in a model's turn."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None
    """the model's own id of it, in families that write one"""
    error: str | None = None
    """why it does not run; None: it does"""
    kind: Literal["format", "admissible"] = "admissible"
    """of the error: the arguments are not a JSON object, or there is no such tool, or they do not fit its schema"""


@dataclass(frozen=True)
class ParsedAction:
    """``action`` as the environment spells it; or None, with the ``reason`` and its kind.

    A turn of tool calls may have both: some of its calls run, and the reason says why the others do not.
    """

    action: str | None
    reason: str | None = None
    kind: Literal["format", "admissible"] = "format"
    """of the reason: there is no action in the text, or one that is not admissible now"""
    content: str | None = field(default=None, repr=False, compare=False)
    """the turn after its thoughts, empty if it ends before they do; None: the thoughts were not cut off"""
    calls: tuple[Call, ...] = ()
    """all calls of the environment's tools, in order"""
    feedback: str | None = None
    """what the model is shown beside the results of its calls; in place of the observation, if no call has a result"""

    def __post_init__(self) -> None:
        if (self.action is None) == (self.reason is None) and (self.action is None or not self.calls):
            raise ValueError(f"an action or the reason why there is none, not {self.action!r} and {self.reason!r}")
        if self.action is not None:  # half a surrogate pair, which JSON can spell, does not travel between processes
            object.__setattr__(self, "action", self.action.encode("utf-8", "replace").decode("utf-8"))

    @property
    def valid(self) -> bool:
        return self.reason is None


UNFINISHED = ParsedAction(None, "no action: the turn ends before its thoughts do", content="")

Parser = Callable[[str, "Sequence[str] | None"], ParsedAction]
"""Reads the action in the decoded turn, given the admissible actions, if known. Never raises."""


def parse_action(text: str, fmt: str, admissible: Sequence[str] | None) -> ParsedAction:
    """Find the action in the part of a model's turn after its thoughts. Never raises because of ``text``.

    Args:
        text: the decoded turn.
        fmt: ``plain`` (the first line), ``tags`` and ``hiper`` (the last ``<action>...</action>``), ``boxed`` (the last
            ``\\boxed{...}``, braces balanced), or a function of your own as ``module:function``.
        admissible: when given, the action must be one of these; case and white space do not matter.
    """
    return load_parser(fmt)(text, admissible)


def load_parser(fmt: str) -> Parser:
    """The parser of a format (see :func:`parse_action`).

    A function of your own takes the text and the admissible actions, and returns the action as text, which is then
    looked up among the admissible ones, or None when there is none in the text, or a :class:`ParsedAction`, which is
    final. If it raises, the error is the reason of the invalid action. It gets the whole turn, thoughts included.

    Raises:
        ValueError: no such format.
        ModuleImportError: no such function.
    """
    if fmt in FORMATS:
        find = FORMATS[fmt]

        def parse(text: str, admissible: Sequence[str] | None) -> ParsedAction:
            content = after_thoughts(text)
            return UNFINISHED if content is None else replace(admit(find(content), admissible, fmt), content=content)

        return parse
    if ":" in fmt:
        function = load_function(fmt, KEY, "text", "admissible")
        return lambda text, admissible: _ask(function, fmt, text, admissible)
    raise ValueError(
        f"unknown action format {fmt!r}{did_you_mean(fmt, FORMATS) or '.'} {KEY} takes {', '.join(FORMATS)} and "
        f"module:function; {' and '.join(CALLS)} work in the agent loop only"
    )


def instruction_of(fmt: str) -> str:
    """How to write an action in the format ``fmt``, for prompts.

    A function of your own has it in an attribute ``instruction``; empty without one.
    """
    if fmt in INSTRUCTIONS:
        return INSTRUCTIONS[fmt]
    return str(getattr(load_function(fmt, KEY), "instruction", ""))


def admit(text: str | None, admissible: Sequence[str] | None, fmt: str) -> ParsedAction:
    """The action for the ``text`` that the format ``fmt`` read in a turn, in the environment's spelling."""
    if text is None:
        return ParsedAction(None, f"no action in the format {fmt!r}")
    action = text.strip()
    if not action:
        return ParsedAction(None, "the action is empty")
    if admissible is None:  # it may be code: white space inside stays
        return ParsedAction(action)
    wanted = words(action)
    for candidate in admissible:
        if words(candidate) == wanted:
            return ParsedAction(candidate)
    return ParsedAction(None, f"not an admissible action: {action[:80]!r}", "admissible")


def _ask(function: Callable[..., Any], fmt: str, text: str, admissible: Sequence[str] | None) -> ParsedAction:
    try:
        answer = function(text, admissible)
    except Exception as error:
        return ParsedAction(None, f"{fmt} raised {type(error).__name__}: {str(error)[:200]}")
    if isinstance(answer, ParsedAction):
        return answer
    if answer is None or isinstance(answer, str):
        return admit(answer, admissible, fmt)
    return ParsedAction(None, f"{fmt} must return text, None or a ParsedAction, not {type(answer).__name__}")


def _plain(text: str) -> str | None:
    return text.strip().partition("\n")[0]


def _tags(text: str) -> str | None:
    span = _last_tags(text, "action")
    return text[slice(*span)].removeprefix("<action>").removesuffix("</action>") if span else None


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


FORMATS: dict[str, Callable[[str], str | None]] = {"plain": _plain, "tags": _tags, "hiper": _tags, "boxed": _boxed}
