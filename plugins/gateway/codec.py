"""Messages to token ids, and token ids to a reply: all contact with the model's template, builder and tool parser."""

from __future__ import annotations

import asyncio
import json
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.model_texts import opens_thoughts, split_thoughts
from verl_turnkey.envs.prompting.actions import ControlTokens
from verl_turnkey.plugins.gateway.messages import Message, Reply, Request, ToolCall
from verl_turnkey.plugins.notices import warn_once
from verl_turnkey.plugins.rollout.action_reader import ACT, HEADER, OPENING
from verl_turnkey.plugins.rollout.episode import Generated, Prompt
from verl_turnkey.plugins.rollout.tool_calls import call_parser, read_calls, tools_of
from verl_turnkey.plugins.rollout.turn_tail import ASKED, TurnTail, end_tokens, learn
from verl_turnkey.plugins.verl_api import builders

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


Ids = Sequence[int]
Calls = Sequence[ToolCall]
Messages = Sequence[Message]
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

    def first(self, messages: Messages, tools: Tools, images: list[Any] | None = None) -> list[int]:
        """The ids of a prompt with all of ``messages``."""
        ...

    def continued(self, prompt: Ids, sampled: Ids, calls: Calls, new: Messages, tools: Tools) -> list[int] | None:
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

    async def read(self, ids: Ids, prompt: Ids, tools: Tools, stop: Sequence[str] = (), cut: bool = False) -> Parsed:
        """The thoughts, calls and text of a turn.

        Args:
            ids: of the turn.
            prompt: ids that it answers.
            tools: that its prompt shows; without any, calls are text.
            stop: strings that ended the turn, which its text does not include.
            cut: the limit of tokens ended the turn.
        """
        ...

    def ended(self, ids: Ids) -> bool:
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
        tool_format: see :func:`~verl_turnkey.plugins.rollout.tool_calls.call_parser`.
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

    def first(self, messages: Messages, tools: Tools, images: list[Any] | None = None) -> list[int]:
        self._check_images(messages)
        return builders.first_tokens(self._builder, self._rendered(messages, {}), [*tools] or None, images)

    def continued(self, prompt: Ids, sampled: Ids, calls: Calls, new: Messages, tools: Tools) -> list[int] | None:
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

    async def read(self, ids: Ids, prompt: Ids, tools: Tools, stop: Sequence[str] = (), cut: bool = False) -> Parsed:
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

    def split(self, ids: Ids, prompt: Ids) -> tuple[str, str | None, str | None]:
        """The text of a turn, its thoughts, and what follows them; None: it has no thoughts, or nothing else."""
        opened = opens_thoughts(self.tokenizer.decode(prompt[-OPENING:], skip_special_tokens=False))
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        thoughts, answer = split_thoughts(text, opened)
        return text, None if thoughts is None else self._plain(thoughts).strip(), answer

    def ended(self, ids: Ids) -> bool:
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
            bare, full = (builders.first_tokens(self._builder, [ASKED], tools) for tools in (None, [ACT]))
        except Exception:  # a template may raise anything on what it does not know
            return False
        return bare != full

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
    made = []
    for call in calls:
        arguments = json.dumps(call.arguments, ensure_ascii=False) if text_arguments else {**call.arguments}
        function = {"name": call.name, "arguments": arguments}
        made.append({"id": _id(call), "type": "function", "function": function})
    return {"role": "assistant", "content": "", "tool_calls": made}


def reply_of(
    turn: str,
    request: Request,
    prompt: Prompt,
    generated: Generated,
    parsed: Parsed,
    sampling: Mapping[str, Any],
    codec: TurnCodec,
    cut: bool,
) -> Reply:
    """The reply ``turn`` to ``request``; ``cut``: the limit of tokens ended it."""
    calls = tuple(replace(call, id=f"call_{turn}_{j}", written=call.id) for j, call in enumerate(parsed.calls))
    ended = codec.ended(generated.ids)
    string = None if ended else _first(sampling.get("stop") or (), generated.text)
    log_probs: list[tuple[str, float]] = []
    if request.log_probs and generated.log_probs is not None:
        log_probs = [(codec.token(i), p) for i, p in zip(generated.ids, generated.log_probs, strict=True)]
    return Reply(
        id=turn,
        text=parsed.text,
        calls=calls,
        reasoning=parsed.reasoning,
        finish="length" if cut else "stop",
        prompt_tokens=len(prompt.ids),
        completion_tokens=len(generated.ids),
        log_probs=log_probs,
        cached_tokens=generated.extra_fields.get("num_cached_tokens") or 0,
        stop=string if string in request.stop else None,
    )


def _first(strings: Sequence[str], text: str) -> str | None:
    """The string that occurs first in ``text``, at which the model's server stopped."""
    return min((string for string in strings if string in text), key=text.index, default=None)
