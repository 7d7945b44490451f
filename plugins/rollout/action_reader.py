"""Readers of the action in a turn: a text parser, or a tool parser for tool calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.base import words
from verl_turnkey.envs.model_texts import after_thoughts, opens_thoughts
from verl_turnkey.envs.prompting.actions import (
    FORMATS,
    INSTRUCTIONS,
    TOOL_CALL,
    TOOLS,
    UNFINISHED,
    ParsedAction,
    admit,
    instruction_of,
    load_parser,
)
from verl_turnkey.envs.tools import calls_text, words_text
from verl_turnkey.plugins.rollout.tool_calls import (
    AT_LIMIT,
    CallParser,
    Tools,
    TurnCalls,
    call_parser,
    read_calls,
    tools_of,
)

ACT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "act",
        "description": "Take one action in the environment.",
        "parameters": {
            "type": "object",
            "properties": {"action": {"type": "string", "description": "the action, as the environment writes it"}},
            "required": ["action"],
        },
    },
}
"""the one tool of the format ``json``, as the chat template gets it"""
ONLY_ACT = tools_of([ACT])
BEGIN, END = "<action>", "</action>"
NO_TOOLS = (
    f"turnkey.rollout.action_format={TOOLS} calls the tools of the environment; for one without tools set tags, or "
    f"{TOOL_CALL}, which has the one tool act"
)

CUT = ParsedAction(None, f"no action: {AT_LIMIT} before it was finished")
MORE = "1"
"""how an action in words may go on"""

OPENING = 16
"""as many of a prompt's last tokens hold what opens the thoughts"""
HEADER = r"(?:<\|start\|>assistant)?<\|channel\|>[^<]*<\|message\|>"
"""of an answer in the harmony format, whose control tokens do not part it from the answer"""


def _answer(tokenizer: Any, ids: list[int], prompt: Sequence[int], header: str = "") -> list[int] | None:
    """The ids of a turn after its thoughts, all of them where it has none; None if it ends before they do.

    ``header``: an expression for what is left out of the answer, too.
    """
    opened = opens_thoughts(tokenizer.decode(prompt[-OPENING:], skip_special_tokens=False))
    text = tokenizer.decode(ids, skip_special_tokens=False)
    answer = after_thoughts(text, opened)
    if answer is None:
        return None
    answer = re.sub(header, "", answer) if header else answer
    return ids if answer == text else tokenizer.encode(answer, add_special_tokens=False)


def read_summary(tokenizer: Any, ids: list[int], prompt: Sequence[int], cut: bool) -> ParsedAction:
    """The summary in a turn, its answer after the thoughts; ``content`` has it even if it is unfinished.

    Args:
        ids: of the turn.
        prompt: ids that the turn answers.
        cut: the token limit ended the turn.
    """
    answer = _answer(tokenizer, ids, prompt, HEADER)
    if answer is None:
        return UNFINISHED
    content = tokenizer.decode(answer, skip_special_tokens=True).strip()
    if cut or not content:
        return ParsedAction(None, f"{AT_LIMIT} before the summary ended" if cut else "no summary", content=content)
    return ParsedAction(content, content=content)


class TextReader:
    """Reads the formats that are text. A parser of the user's own gets the whole turn, thoughts included."""

    tools: list[dict[str, Any]] | None = None
    """the tools that the chat template shows; None: none"""
    stop_token_ids: Sequence[int] = ()
    """ids that end a turn, besides those of the configuration"""

    def __init__(self, fmt: str, tokenizer: Any) -> None:
        self._parse = load_parser(fmt)
        self._whole = fmt not in FORMATS
        self._tokenizer = tokenizer
        self.instruction = instruction_of(fmt)

    async def read(
        self, ids: list[int], text: str, admissible: Sequence[str] | None, prompt: Sequence[int], cut: bool = False
    ) -> ParsedAction:
        """The action in a turn.

        Args:
            ids: of the turn.
            text: of the turn, decoded.
            admissible: the actions that the environment takes now; None: any.
            prompt: ids that the turn answers.
            cut: the limit of tokens ended the turn: an action that may have gone on is none.
        """
        answer = _answer(self._tokenizer, ids, prompt, HEADER)
        if answer is None and not self._whole:
            return UNFINISHED
        content = text if answer is ids else self._tokenizer.decode(answer or [], skip_special_tokens=True)
        read = text if self._whole else content
        parsed = self._parse(read, admissible)
        if cut and self._open(read, parsed.action, admissible):
            parsed = _with_feedback(CUT)
        return replace(parsed, content=content)

    def _open(self, text: str, action: str | None, admissible: Sequence[str] | None) -> bool:
        """Whether a longer turn has another action: one of no other admissible action's beginning has not."""
        if text.rfind(BEGIN) > text.rfind(END):
            return action is not None or not self._whole  # the reason that a user's function gives is final
        if action is None:
            return False
        further = self._parse(text + MORE, None).action
        if further == self._parse(text, None).action:
            return False
        return admissible is None or any(
            words(other).startswith(words(action)) for other in admissible if words(other) != words(action)
        )


class ToolCallReader:
    """Reads the last tool call after the thoughts, which must call ``act``; the rest of the turn is ignored.

    Args:
        parser: see :func:`call_parser`.
    """

    instruction = INSTRUCTIONS[TOOL_CALL]

    def __init__(self, parser: str, tokenizer: Any) -> None:
        self._parser = call_parser(parser, tokenizer)
        self._tokenizer = tokenizer
        self.tools = [ACT]
        self.stop_token_ids = self._parser.stop_token_ids

    async def read(
        self, ids: list[int], text: str, admissible: Sequence[str] | None, prompt: Sequence[int], cut: bool = False
    ) -> ParsedAction:
        """As :meth:`TextReader.read`."""
        answer = _answer(self._tokenizer, ids, prompt)
        if answer is None:
            return UNFINISHED
        content = text if answer is ids else self._tokenizer.decode(answer, skip_special_tokens=True)
        turn = await read_calls(self._parser, answer, ONLY_ACT, cut)
        reason = turn.broken or (turn.calls[-1].error if turn.calls else "no tool call")
        if reason is not None:
            return replace(_with_feedback(ParsedAction(None, reason)), content=content)
        return replace(admit(turn.calls[-1].arguments["action"], admissible, TOOL_CALL), content=content)


class ToolsReader:
    """Reads all calls of the environment's tools after the thoughts; without one the turn is an action in words.

    Args:
        parser: see :func:`call_parser`.
        tools: of the episode; None: not known yet, and a tool stands for them.
        as_json: whether the environment takes JSON, since it has tools of its own; else words are its action.
    """

    instruction = INSTRUCTIONS[TOOLS]

    def __init__(self, parser: CallParser, tokenizer: Any, tools: Tools | None = None, as_json: bool = True) -> None:
        self._parser, self._tokenizer, self._tools, self._as_json = parser, tokenizer, tools, as_json
        self.tools = [ACT] if tools is None else tools.schemas
        self.stop_token_ids = parser.stop_token_ids

    def with_tools(self, tools: Sequence[dict[str, Any]], as_json: bool = True) -> ToolsReader:
        """The reader of an episode with these tools. Raises ``EnvironmentFailure``: see :class:`Tools`."""
        return ToolsReader(self._parser, self._tokenizer, tools_of(tools), as_json)

    async def read(
        self, ids: list[int], text: str, admissible: Sequence[str] | None, prompt: Sequence[int], cut: bool = False
    ) -> ParsedAction:
        """As :meth:`TextReader.read`. The action is the canonical JSON of ``envs.tool_info``."""
        assert self._tools is not None
        answer = _answer(self._tokenizer, ids, prompt)
        if answer is None:
            return _with_feedback(UNFINISHED)
        turn = await read_calls(self._parser, answer, self._tools, cut)
        content = self._tokenizer.decode(_answer(self._tokenizer, ids, prompt, HEADER) or [], skip_special_tokens=True)
        return replace(self._parsed(turn, content, admissible, cut), content=content)

    def _parsed(self, turn: TurnCalls, content: str, admissible: Sequence[str] | None, cut: bool) -> ParsedAction:
        if turn.named and turn.broken is None:
            return _calls(turn)
        if reason := turn.broken or (turn.refused and turn.refused.error):
            return _with_feedback(ParsedAction(None, reason))
        if not content.strip():
            return _with_feedback(ParsedAction(None, "neither a tool call nor any words"))
        if cut:
            return _with_feedback(CUT)
        return ParsedAction(words_text(content.strip())) if self._as_json else admit(content, admissible, TOOLS)


def _with_feedback(parsed: ParsedAction) -> ParsedAction:
    return replace(parsed, feedback=f"Error: {parsed.reason}")


def _calls(turn: TurnCalls) -> ParsedAction:
    run = [(call.name, call.arguments) for call in turn.calls if call.error is None]
    refused, unread = turn.refused, len(turn.calls) - len(turn.named)
    reason, kind = (None, "format") if refused is None else (refused.error, refused.kind)
    if unread:
        reason, kind = f"{unread} of {len(turn.calls)} tool calls cannot be read", "format"
    feedback = f"Error: {reason}" if unread else None
    return ParsedAction(calls_text(run) if run else None, reason, kind, calls=turn.named, feedback=feedback)


ActionReader = TextReader | ToolCallReader | ToolsReader


def action_reader(fmt: str, tool_parser: str, tokenizer: Any) -> ActionReader:
    """The reader of ``turnkey.rollout.action_format``."""
    if fmt == TOOLS:
        return ToolsReader(call_parser(tool_parser, tokenizer), tokenizer)
    return ToolCallReader(tool_parser, tokenizer) if fmt == TOOL_CALL else TextReader(fmt, tokenizer)


def check_tool_template(tokenizer: Any, fmt: str = TOOL_CALL, **kwargs: Any) -> None:
    """Raise ConfigError when the model's chat template does not show tools: no turn could ever call one."""
    without, with_tools = (
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, tools=tools, **kwargs)
        for tools in (None, [ACT])
    )
    if without == with_tools:
        raise ConfigError(
            f"turnkey.rollout.action_format={fmt} needs a model whose chat template shows tools, and this "
            "model's does not: set turnkey.rollout.action_format=tags, or actor_rollout_ref.model.custom_chat_template"
        )
