"""Readers of the action in a turn: a text parser, or one of verl's tool parsers for tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.prompting.actions import (
    FORMATS,
    INSTRUCTIONS,
    TOOL_CALL,
    UNFINISHED,
    ParsedAction,
    admit,
    instruction_of,
    load_parser,
)
from verl_turnkey.envs.thoughts import after_thoughts, opens_thoughts
from verl_turnkey.plugins.config.schema import closest

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


OPENING = 16
"""as many of a prompt's last tokens hold what opens the thoughts"""
HEADER = r"(?:<\|start\|>assistant)?<\|channel\|>[^<]*<\|message\|>"
"""of an answer in the harmony format, whose control tokens do not part it from the answer"""
HARMONY_CALL = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=functions\.([\w.-]+))?<\|channel\|>\w+(?: to=functions\.([\w.-]+))?"
    r" ?(?:<\|constrain\|>)?(?:json)?<\|message\|>"
)
"""how a tool call begins in the harmony format: gpt-oss has the tool's name in the channel or, as in its chat template,
before it, and the generation prompt has the first ``<|start|>assistant``"""


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
        self, ids: list[int], text: str, admissible: Sequence[str] | None, prompt: Sequence[int]
    ) -> ParsedAction:
        """The action in a turn, given as token ids and as decoded text, which answers the ids of ``prompt``."""
        answer = _answer(self._tokenizer, ids, prompt, HEADER)
        if answer is None and not self._whole:
            return UNFINISHED
        content = text if answer is ids else self._tokenizer.decode(answer or [], skip_special_tokens=True)
        return replace(self._parse(text if self._whole else content, admissible), content=content)


class ToolCallReader:
    """Reads the last tool call after the thoughts, which must call ``act``; the rest of the turn is ignored.

    Args:
        parser: one of verl's (``actor_rollout_ref.rollout.multi_turn.format``).
    """

    instruction = INSTRUCTIONS[TOOL_CALL]

    def __init__(self, parser: str, tokenizer: Any) -> None:
        check_tool_parser(parser)
        self._parser = ToolParser.get_tool_parser(parser, tokenizer)
        self._harmony = parser == "gpt-oss"
        self._tokenizer = tokenizer
        self.tools = [ACT]
        self._schemas = [OpenAIFunctionToolSchema(**ACT)]
        self.stop_token_ids = self._parser.stop_token_ids

    async def read(
        self, ids: list[int], text: str, admissible: Sequence[str] | None, prompt: Sequence[int]
    ) -> ParsedAction:
        """As :meth:`TextReader.read`."""
        answer = _answer(self._tokenizer, ids, prompt)
        if answer is None:
            return UNFINISHED
        content = text if answer is ids else self._tokenizer.decode(answer, skip_special_tokens=True)
        return replace(await self._call(answer, admissible), content=content)

    async def _call(self, ids: list[int], admissible: Sequence[str] | None) -> ParsedAction:
        if self._harmony:
            ids = self._tokenizer.encode(harmony_calls(self._tokenizer.decode(ids)), add_special_tokens=False)
        try:
            _, calls = await self._parser.extract_tool_calls(ids, self._schemas)
        except Exception as error:  # verl's parsers may raise anything on what the model wrote
            return ParsedAction(None, f"the tool parser raised {type(error).__name__}: {str(error)[:200]}")
        return _called(calls[-1], admissible) if calls else ParsedAction(None, "no tool call")


def harmony_calls(text: str) -> str:
    """``text`` with all its calls in the one spelling that verl's parser of gpt-oss reads."""

    def spelled(header: re.Match[str]) -> str:
        name = header[1] or header[2]
        call = f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return call if name else header[0]

    return HARMONY_CALL.sub(spelled, text)


def _called(call: FunctionCall, admissible: Sequence[str] | None) -> ParsedAction:
    if call.name != "act":
        return ParsedAction(None, f"a call of {call.name[:80]!r}, which is no tool here")
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError) as error:
        return ParsedAction(None, f"the arguments of the tool call are no JSON: {error}")
    action = arguments.get("action") if isinstance(arguments, Mapping) else None
    if isinstance(action, int | float) and not isinstance(action, bool):
        action = str(action)  # a numbered choice
    if not isinstance(action, str):
        return ParsedAction(None, f"the tool call must give the action as text, not {str(arguments)[:80]}")
    return admit(action, admissible, TOOL_CALL)


def action_reader(fmt: str, tool_parser: str, tokenizer: Any) -> TextReader | ToolCallReader:
    """The reader of ``turnkey.rollout.action_format``."""
    return ToolCallReader(tool_parser, tokenizer) if fmt == TOOL_CALL else TextReader(fmt, tokenizer)


def check_tool_parser(name: str) -> None:
    """Raise ConfigError unless verl has a tool parser of that name."""
    if name not in ToolParser._registry:
        raise ConfigError(
            f"actor_rollout_ref.rollout.multi_turn.format={name} is no tool parser of verl's"
            f"{closest(name, list(ToolParser._registry))}"
        )


def check_tool_template(tokenizer: Any, **kwargs: Any) -> None:
    """Raise ConfigError when the model's chat template does not show tools: no turn could ever call one."""
    without, with_tools = (
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False, tools=tools, **kwargs)
        for tools in (None, [ACT])
    )
    if without == with_tools:
        raise ConfigError(
            f"turnkey.rollout.action_format={TOOL_CALL} needs a model whose chat template shows tools, and this "
            "model's does not: set turnkey.rollout.action_format=tags, or actor_rollout_ref.model.custom_chat_template"
        )
