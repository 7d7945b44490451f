"""The tokens between a model's turn and the next message, derived from the model's own chat template.

A turn that the server cut (by its number of tokens, or at a stop string) lacks the tokens that end it. The newline
after them may be missing, too, where neither the model nor verl's builder writes it. Both are appended here, masked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.model_texts import FAMILIES
from verl_turnkey.plugins.rollout.token_spans import common_start
from verl_turnkey.plugins.verl_api import builders

ASKED: dict[str, Any] = {"role": "user", "content": "q"}
"""Stands for all messages before the model's last turn: no builder needs them to append what comes after it."""
NEXT = "z"
THOUGHTS = tuple((family.begin, family.end + family.answer) for family in FAMILIES)
"""how models begin their thoughts, and how they go on after them"""
ENDS = ("<|return|>", "<|call|>")
"""tokens that end a turn although the template writes another one after past turns"""
ENDS_BEFORE_NEXT = ("<|user|>", "<|observation|>")
"""tokens that end a turn by beginning the next message, where the template writes nothing after a turn"""
CALLED = (("act", "call_act0"),)
"""name and id of a call"""
SEVERAL = (("act", "call00001"), ("act", "call00002"))
OTHERWISE = "set turnkey.rollout.prompt=template"


@dataclass(frozen=True)
class TurnTail:
    """How turns of one model end.

    Args:
        user: ids between what the model wrote and a user message.
        tool: ids between a tool call and the tool's message; None: the model's template has no such message.
        generation: ids with which the template begins the model's turn.
        ends: ids that end a turn as the first of ``user`` does.
        text_arguments: whether the template wants the arguments of a past call as JSON text.
        parallel: whether the template has several calls in a turn, each with a message of its own.
    """

    tokenizer: Any
    user: tuple[int, ...]
    tool: tuple[int, ...] | None
    generation: tuple[int, ...]
    ends: frozenset[int]
    text_arguments: bool = False
    parallel: bool = False

    def close(self, ids: Sequence[int], role: str, bare: bool = False) -> list[int]:
        """What to append to a turn of the model before the message of ``role`` that answers it.

        ``bare``: the opening of thoughts that ends ``generation`` was cut off before this turn.
        """
        tail = self.tool if role == "tool" and self.tool is not None else self.user
        if ids and ids[-1] in self.ends:
            return list(tail[1:])
        written = next(n for n in range(min(len(tail), len(ids)), -1, -1) if tuple(ids[len(ids) - n :]) == tail[:n])
        thoughts = [] if written else self._end_of_thoughts(ids if bare else [*self.generation, *ids])
        return [*thoughts, *tail[written:]]

    def _end_of_thoughts(self, ids: Sequence[int]) -> list[int]:
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        for begin, end in THOUGHTS:
            closed = text.rfind(end)
            if text.rfind(begin) > closed:
                # The end of the thoughts may begin with the token that ends the turn; the tail writes it.
                end_ids = self.tokenizer.encode(end, add_special_tokens=False)
                return [] if self.user and end_ids[:1] == list(self.user[:1]) else end_ids
        return []

    def without_thoughts(self, ids: Sequence[int]) -> list[int] | None:
        """A turn with its thoughts cut out, encoded anew; None when it has none, empty when it has nothing else."""
        before, text = (self.tokenizer.decode(part, skip_special_tokens=False) for part in (self.generation, ids))
        for begin, end in THOUGHTS:
            closed = text.rfind(end)
            if closed >= 0 and begin in before + text[:closed]:
                return self.tokenizer.encode(text[closed + len(end) :].lstrip(), add_special_tokens=False)
            if (before + text).rfind(begin) > (before + text).rfind(end):
                return []
        return None

    @property
    def opened(self) -> int:
        """How many of the last ids of ``generation`` begin the model's thoughts."""
        for n in range(1, len(self.generation) + 1):
            text = self.tokenizer.decode(self.generation[-n:], skip_special_tokens=False)
            if any(text.lstrip().startswith(begin) and end not in text for begin, end in THOUGHTS):
                return n
        return 0

    def turn(self, role: str, calls: Sequence[tuple[str, str]] = CALLED) -> dict[str, Any]:
        """A message that stands for the model's turn which messages of ``role`` answer.

        ``calls``: names and ids of its calls, where the role is tool.
        """
        return _calls("a", self.text_arguments, calls) if role == "tool" else {"role": "assistant", "content": "a"}


def end_tokens(tokenizer: Any, stop_token_ids: Sequence[int], tail: TurnTail | None) -> frozenset[int]:
    """The ids that end a model's turn; ``stop_token_ids``: of the configuration and of the tool parser."""
    ends = {tokenizer.eos_token_id, tokenizer.pad_token_id, *stop_token_ids}
    return frozenset((ends if tail is None else ends | {*tail.user[:1], *tail.ends}) - {None})


def learn(builder: Any, tokenizer: Any, tools: list[dict[str, Any]] | None, role: str) -> TurnTail:
    """Append messages with verl's builder and compare with a render of the whole conversation.

    Args:
        builder: verl's continuous-token builder of the model.
        tools: the tools that the template shows; None: actions are text.
        role: ``turnkey.rollout.observation_role``.

    Raises:
        ConfigError: the model's template, or verl's builder for it, cannot continue after the model's turn; names the
            key to set.
    """
    return _Learner(builder, tokenizer, tools).learn(role)


class _Learner:
    def __init__(self, builder: Any, tokenizer: Any, tools: list[dict[str, Any]] | None) -> None:
        self._builder, self._tokenizer, self._tools = builder, tokenizer, tools
        self._family = type(builder).__name__
        if builders.renders_anew(builder):
            raise ConfigError(
                f"turnkey.rollout.prompt=conversation: verl's {self._family} renders the whole conversation anew, "
                f"which loses the sampled tokens: {OTHERWISE}"
            )
        self._first = self._render([ASKED])

    def learn(self, role: str) -> TurnTail:
        tokenizer, tools = self._tokenizer, self._tools
        user = self._between(
            lambda content: {"role": "assistant", "content": content}, [{"role": "user", "content": NEXT}]
        )
        # The first prompts for two different messages have the generation prompt in common.
        generation = _common_end(self._first, builders.first_tokens(self._builder, [{**ASKED, "content": "w"}], tools))
        tool: tuple[int, ...] | None = None
        text_arguments = parallel = False
        if tools and role != "user":
            try:
                tool, text_arguments = self._tool_tail(user)
            except ConfigError:
                if role == "tool":
                    raise
            else:
                parallel = self._parallel(text_arguments)
        vocabulary = tokenizer.get_added_vocab()
        ends = {vocabulary[token] for token in (ENDS if user else ENDS_BEFORE_NEXT) if token in vocabulary}
        if not user and tokenizer.eos_token_id is not None:
            ends.add(tokenizer.eos_token_id)
        return TurnTail(tokenizer, user, tool, generation, frozenset(ends - set(user[:1])), text_arguments, parallel)

    def _tool_tail(self, user: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """What stands before a tool's message, and whether the template wants arguments as text, as some do."""
        message = {"role": "tool", "name": "act", "content": NEXT}
        try:
            as_text, after = False, self._between(lambda content: _calls(content, False), [message])
        except ConfigError as error:
            try:
                as_text, after = True, self._between(lambda content: _calls(content, True), [message])
            except ConfigError:
                raise error from None
        # Before the end of the turn stands the end of the call, which is the model's own.
        return (user if user and after[-len(user) :] == user else ()), as_text

    def _parallel(self, as_text: bool) -> bool:
        """Whether the builder appends the results of two calls as the template writes them."""
        messages = [{"role": "tool", "name": name, "tool_call_id": id, "content": NEXT} for name, id in SEVERAL]
        try:
            self._between(lambda content: _calls(content, as_text, SEVERAL), messages)
        except ConfigError:  # Llama's template refuses a second call
            return False
        return True

    def _render(self, messages: list[dict[str, Any]]) -> list[int]:
        try:
            return builders.first_tokens(self._builder, messages, self._tools)
        except Exception as error:  # of the template, which may demand anything
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(
                f"turnkey.rollout.prompt=conversation: the model's chat template refuses the messages {roles} "
                f"({_cause(error)}; verl's {self._family}): {_way_out(messages[-1])}"
            ) from error

    def _between(self, turn: Callable[[str], dict[str, Any]], messages: list[dict[str, Any]]) -> tuple[int, ...]:
        """The ids between a turn of the model and ``messages`` that the builder leaves to whoever wrote the turn.

        Render the whole conversation with two different turns: their common suffix, minus what the builder appends.
        """
        past, message = [ASKED, turn("a")], messages[-1]
        full = _common_end(*(self._render([ASKED, turn(content), *messages]) for content in ("a", "b")))
        runtime = [*self._first, *self._tokenizer.encode("a", add_special_tokens=False)]
        try:
            merged = builders.appended_tokens(self._builder, past, [*past, *messages], runtime, self._tools)
        except Exception as error:
            raise ConfigError(
                f"turnkey.rollout.prompt=conversation: verl's {self._family} cannot append a {message['role']} message "
                f"with this model's chat template ({_cause(error)}): {_way_out(message)}"
            ) from error
        added = tuple(merged[len(runtime) :])
        if merged[: len(runtime)] != runtime or not added or full[-len(added) :] != added:
            raise ConfigError(
                f"turnkey.rollout.prompt=conversation: verl's {self._family} appends a {message['role']} message as "
                f"{self._tokenizer.decode(added)!r}, and this model's chat template writes "
                f"{self._tokenizer.decode(full)!r}: {_way_out(message)}"
            )
        return full[: -len(added)]


def _common_end(first: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """The ids with which both end."""
    return tuple(first[len(first) - common_start(first[::-1], other[::-1]) :])


def _calls(action: str, as_text: bool, calls: Sequence[tuple[str, str]] = CALLED) -> dict[str, Any]:
    arguments: Any = json.dumps({"action": action}) if as_text else {"action": action}
    tool_calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}} for name, id in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _cause(error: BaseException) -> str:
    """The first error of the chain: verl retries another way, and the error of that says little."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"


def _way_out(message: dict[str, Any]) -> str:
    return f"set turnkey.rollout.observation_role=user, or {OTHERWISE[4:]}" if message["role"] == "tool" else OTHERWISE
