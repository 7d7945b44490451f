"""Messages to token ids, and token ids to a reply: all contact with the model's template, builder and tool parser."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Protocol

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.model_texts import opens_thoughts, split_thoughts
from verl_turnkey.envs.prompting.actions import ControlTokens
from verl_turnkey.plugins.gateway.messages import Message, ToolCall
from verl_turnkey.plugins.gateway.token_bound import TokenBound
from verl_turnkey.plugins.notices import warn_once
from verl_turnkey.plugins.rollout.action_reader import ACT, HEADER, OPENING
from verl_turnkey.plugins.rollout.tool_calls import read_calls, tools_of
from verl_turnkey.plugins.rollout.tool_parsers import call_parser
from verl_turnkey.plugins.rollout.turn_tail import ASKED, TurnTail, end_tokens, learn
from verl_turnkey.plugins.verl_api import builders

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Parsed:
    """What the model wrote in a turn."""

    text: str
    calls: tuple[ToolCall, ...] = ()
    """with the ids that the model wrote, or empty ones"""
    reasoning: str | None = None
    refused: str | None = None
    """why a tool call in it is invalid; one that is unfinished or unreadable is left in ``text``"""


class TurnCodec(Protocol):
    """What a session asks of a model's codec. Its methods tokenize, so they are called outside the event loop."""

    shows_tools: bool
    """whether the model's prompts show tools"""
    stop_token_ids: Sequence[int]
    """ids that end a turn, besides those of the model"""
    at_least: Callable[[Sequence[Message]], int]
    """a number of ids that a prompt with all of these messages has at least; quick, however long they are"""

    def first(self, messages: Sequence[Message], tools: Tools, images: list[Any] | None = None) -> list[int]:
        """The ids of a prompt with all of ``messages``."""
        ...

    def continued(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        calls: Sequence[ToolCall],
        new: Sequence[Message],
        tools: Tools,
    ) -> list[int] | None:
        """The ids of a prompt that goes on after a turn: those sampled stay as they are, ``new`` is appended.

        Args:
            prompt: ids that the turn answered.
            sampled: ids of the turn.
            calls: of the turn.
            new: the messages that follow it.
            tools: of the prompt.

        Returns:
            None: the model's template, or verl's builder for it, cannot append these messages.
        """
        ...

    async def read(
        self, ids: Sequence[int], prompt: Sequence[int], tools: Tools, stop: Sequence[str] = (), cut: bool = False
    ) -> Parsed:
        """The thoughts, calls and text of a turn.

        Args:
            ids: of the turn.
            prompt: ids that it answers.
            tools: that its prompt shows; without any, calls are text.
            stop: strings that ended the turn, which its text does not include.
            cut: the limit of tokens ended the turn.
        """
        ...

    def ended(self, ids: Sequence[int]) -> bool:
        """Whether a turn ends with a token that ends turns."""
        ...

    def token(self, token_id: int) -> str:
        """The text of a token."""
        ...


class Codec(TurnCodec):
    """Renders and reads the turns of one model by its tokenizer, chat template and tool parser.

    Args:
        tokenizer: the model's.
        builder: verl's continuous-token builder of the model.
        tool_format: see :func:`~verl_turnkey.plugins.rollout.tool_parsers.call_parser`.
        stop_token_ids: ids that end a turn, besides those of the model and of the parser.

    Raises:
        ConfigError: there is no such parser.
    """

    def __init__(
        self, tokenizer: Any, builder: Any, tool_format: str = "hermes", stop_token_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer, self._builder = tokenizer, builder
        self._parser = call_parser(tool_format, tokenizer)
        self._control = ControlTokens(tokenizer)
        self.at_least = TokenBound(tokenizer)
        self.shows_tools = self._shows_tools()
        self._tail = self._learn()
        self.stop_token_ids = [*stop_token_ids, *self._parser.stop_token_ids]
        self._ends = end_tokens(tokenizer, self.stop_token_ids, self._tail)
        special = {str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special}
        special |= {str(token) for token in tokenizer.all_special_tokens}
        self._special = re.compile("|".join(re.escape(token) for token in sorted(special, key=len, reverse=True)))

    def first(self, messages: Sequence[Message], tools: Tools, images: list[Any] | None = None) -> list[int]:
        self._check_images(messages)
        return builders.first_tokens(self._builder, self._rendered(messages, {}), [*tools] or None, images)

    def continued(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        calls: Sequence[ToolCall],
        new: Sequence[Message],
        tools: Tools,
    ) -> list[int] | None:
        self._check_images(new)
        if self._tail is None or not new:
            return None
        text_arguments = self._tail.text_arguments
        answered = [call for call in calls if any(message.call_id == call.id for message in new)]
        turn = _call_message(answered or calls, text_arguments) if calls else {"role": "assistant", "content": "a"}
        past = [ASKED, turn]
        role = "tool" if new[0].role == "tool" else "user"
        past_ids = [*prompt, *sampled, *self._tail.close(sampled, role)]
        made = {call.id: call for call in calls}
        try:
            return builders.appended_tokens(
                self._builder, past, [*past, *self._rendered(new, made, head=False)], past_ids, [*tools] or None
            )
        except Exception as error:  # of a template, which may refuse any order of roles
            warn_once(f"messages cannot be appended to a conversation, so a new row begins: {str(error)[:200]}")
            return None

    async def read(
        self, ids: Sequence[int], prompt: Sequence[int], tools: Tools, stop: Sequence[str] = (), cut: bool = False
    ) -> Parsed:
        text, thoughts, answer = await asyncio.to_thread(self.split, ids, prompt)
        if answer is None:
            return Parsed("", reasoning=thoughts)
        plain = self._text(answer, stop, stripped=thoughts is not None)
        if not tools:
            return Parsed(plain, reasoning=thoughts)
        kept = [*ids] if answer == text else self.tokenizer.encode(answer, add_special_tokens=False)
        turn = await read_calls(self._parser, kept, tools_of(tools, strict=False), cut)
        refused = turn.broken or (turn.refused.error if turn.refused else None)
        # A call of no tool, or with arguments that do not fit, goes to the agent as it is: who runs tools answers it.
        calls = [] if turn.broken else [call for call in turn.named if call.error is None or call.kind == "admissible"]
        if not calls:
            return Parsed(plain, reasoning=thoughts, refused=refused)
        made = tuple(ToolCall(call.name, call.arguments, call.id or "") for call in calls)
        return Parsed(self._text(turn.text, stop, stripped=True).rstrip(), made, thoughts, refused)

    def split(self, ids: Sequence[int], prompt: Sequence[int]) -> tuple[str, str | None, str | None]:
        """The text of a turn, its thoughts, and what follows them; None: it has no thoughts, or nothing else."""
        opened = opens_thoughts(self.tokenizer.decode(prompt[-OPENING:], skip_special_tokens=False))
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        thoughts, answer = split_thoughts(text, opened)
        return text, None if thoughts is None else self._plain(thoughts).strip(), answer

    def ended(self, ids: Sequence[int]) -> bool:
        return bool(ids) and ids[-1] in self._ends

    def token(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def _plain(self, text: str) -> str:
        return self._special.sub("", re.sub(HEADER, "", text))

    def _text(self, text: str, stop: Sequence[str], stripped: bool) -> str:
        """``text`` without control tokens and what begins with a stop string."""
        text = self._plain(text)
        for string in stop:
            text = text.partition(string)[0]
        return text.lstrip() if stripped else text

    def _check_images(self, messages: Sequence[Message]) -> None:
        """Raise ValueError if the model takes no images, or a message has some whose role cannot show them."""
        with_images = {message.role for message in messages if message.images}
        if with_images and not builders.takes_images(self._builder):
            raise ValueError("this model takes no images")
        if with_images & {"system", "assistant"}:
            raise ValueError("images belong in messages of the user and in results of tools")

    def _rendered(
        self, messages: Sequence[Message], made: Mapping[str, ToolCall], head: bool = True
    ) -> list[dict[str, Any]]:
        """The messages as chat templates take them.

        The system messages at the start are joined; later ones are the user's, since few templates take them. So are
        the images in results of tools, which follow the last of these: few templates show them where they are.

        Args:
            made: the calls before these messages, by their ids.
            head: whether they begin the conversation.
        """
        made, system, rendered, images = {**made}, [], [], []
        for message, after in zip_longest(messages, messages[1:]):
            if message.role == "system" and head and not rendered:
                system.append(message.text)
                continue
            rendered.append(self._message(message, made))
            made |= {call.id: call for call in message.calls}
            if message.role == "tool" and self.shows_tools:
                images += _image_parts(message)
                if images and (after is None or after.role != "tool"):
                    rendered.append({"role": "user", "content": images})
                    images = []
        return [{"role": "system", "content": "\n\n".join(system)}, *rendered] if system else rendered

    def _message(self, message: Message, made: Mapping[str, ToolCall]) -> dict[str, Any]:
        if message.role == "assistant":
            text_arguments = self._tail is not None and self._tail.text_arguments
            turn = _call_message(message.calls, text_arguments) if message.calls else {"role": "assistant"}
            thoughts = {"reasoning_content": message.reasoning} if message.reasoning else {}
            return {**turn, "content": message.text, **thoughts}
        text = message.text if message.role == "system" else self._control.plain(message.text)
        if message.role == "tool" and self.shows_tools:
            call = made.get(message.call_id or "") or ToolCall("tool", {}, message.call_id or "")
            return {"role": "tool", "content": text, "name": call.name, "tool_call_id": _id(call)}
        if not message.images:
            return {"role": "user", "content": text}
        return {"role": "user", "content": [*_image_parts(message), {"type": "text", "text": text}]}

    def _shows_tools(self) -> bool:
        """Whether the model's chat template shows tools."""
        try:
            without_tools, with_tools = (
                builders.first_tokens(self._builder, [ASKED], tools) for tools in (None, [ACT])
            )
        except Exception:  # a template may raise anything on what it does not know
            return False
        return without_tools != with_tools

    def _learn(self) -> TurnTail | None:
        """How the model's turns end; None: nothing can be appended to them."""
        try:
            return learn(self._builder, self.tokenizer, [ACT] if self.shows_tools else None, "auto")
        except ConfigError as error:
            reason = str(error).removeprefix("turnkey.rollout.prompt=conversation: ").rpartition(": set ")[0]
            warn_once(f"with this model each turn of an agent is a row of its own: {reason}")
            return None


def _id(call: ToolCall) -> str:
    """A call's id as the prompt shows it, if the template does: the model's own, or else nine digits.

    Both are the same in all episodes of a task. Ids of clients stay.
    """
    ours = re.fullmatch(r"call_\w+?_(\d+)_(\d+)", call.id)
    return call.written or (f"{int(ours[1]) % 10**7:07d}{int(ours[2]) % 100:02d}" if ours else call.id)


def _image_parts(message: Message) -> list[dict[str, Any]]:
    return [{"type": "image", "image": image} for image in message.images]


def _call_message(calls: Sequence[ToolCall], text_arguments: bool) -> dict[str, Any]:
    made = [
        {
            "id": _id(call),
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments, ensure_ascii=False) if text_arguments else {**call.arguments},
            },
        }
        for call in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}
