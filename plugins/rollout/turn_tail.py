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
    family = type(builder).__name__
    if builders.renders_anew(builder):
        raise ConfigError(
            f"turnkey.rollout.prompt=conversation: verl's {family} renders the whole conversation anew, which loses "
            f"what was sampled: {OTHERWISE}"
        )
    user: dict[str, Any] = {"role": "user", "content": NEXT}
    first = _render(builder, [ASKED], tools, family)
    past, full = _common_end(
        lambda content: [ASKED, {"role": "assistant", "content": content}, user], builder, tools, family
    )
    tail = _between(builder, tokenizer, first, past, [user], full, tools, family)
    generation = _generation(builder, first, tools)
    called: tuple[int, ...] | None = None
    text_arguments = parallel = False
    if tools and role != "user":
        try:
            called, text_arguments = _tool_tail(builder, tokenizer, first, tools, tail, family)
        except ConfigError:
            if role == "tool":
                raise
        else:
            parallel = _parallel(builder, tokenizer, first, tools, text_arguments, family)
    vocabulary = tokenizer.get_added_vocab()
    ends = {vocabulary[token] for token in (ENDS if tail else ENDS_BEFORE_NEXT) if token in vocabulary}
    if not tail and tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    return TurnTail(tokenizer, tail, called, generation, frozenset(ends - set(tail[:1])), text_arguments, parallel)


def _tool_tail(
    builder: Any, tokenizer: Any, first: list[int], tools: list[dict[str, Any]], tail: tuple[int, ...], family: str
) -> tuple[tuple[int, ...], bool]:
    message = {"role": "tool", "name": "act", "content": NEXT}

    def rest(as_text: bool) -> tuple[int, ...]:
        past, full = _common_end(lambda content: [ASKED, _calls(content, as_text), message], builder, tools, family)
        return _between(builder, tokenizer, first, past, [message], full, tools, family)

    as_text = False
    try:
        after = rest(as_text)
    except ConfigError as error:
        as_text = True  # some templates want the arguments as text
        try:
            after = rest(as_text)
        except ConfigError:
            raise error from None
    # Before the end of the turn stands the end of the call, which is the model's own.
    return (tail if tail and after[-len(tail) :] == tail else ()), as_text


def _parallel(
    builder: Any, tokenizer: Any, first: list[int], tools: list[dict[str, Any]], as_text: bool, family: str
) -> bool:
    """Whether the builder appends the results of two calls as the template writes them."""
    messages = [{"role": "tool", "name": name, "tool_call_id": id, "content": NEXT} for name, id in SEVERAL]
    try:
        past, full = _common_end(
            lambda content: [ASKED, _calls(content, as_text, SEVERAL), *messages], builder, tools, family, 2
        )
        _between(builder, tokenizer, first, past, messages, full, tools, family)
    except ConfigError:  # Llama's template refuses a second call
        return False
    return True


def _calls(action: str, as_text: bool, calls: Sequence[tuple[str, str]] = CALLED) -> dict[str, Any]:
    arguments: Any = {"action": action}
    written = json.dumps(arguments) if as_text else arguments
    tool_calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": written}} for name, id in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def _render(builder: Any, messages: list[dict[str, Any]], tools: Any, family: str) -> list[int]:
    try:
        return builders.first_tokens(builder, messages, tools)
    except Exception as error:  # of the template, which may demand anything
        roles = ", ".join(message["role"] for message in messages)
        raise ConfigError(
            f"turnkey.rollout.prompt=conversation: the model's chat template refuses the messages {roles} "
            f"({_cause(error)}; verl's {family}): {_way_out(messages[-1])}"
        ) from error


def _common_end(
    messages: Callable[[str], list[dict[str, Any]]], builder: Any, tools: Any, family: str, after: int = 1
) -> tuple[list[dict[str, Any]], tuple[int, ...]]:
    """Messages up to the model's turn, and the ids that renders with two different turns have in common at the end.

    ``after``: how many messages come after the turn.
    """
    first, second = (_render(builder, messages(content), tools, family) for content in ("a", "b"))
    n = 0
    while n < min(len(first), len(second)) and first[-n - 1] == second[-n - 1]:
        n += 1
    return messages("a")[:-after], tuple(first[len(first) - n :])


def _between(
    builder: Any,
    tokenizer: Any,
    first: list[int],
    past: list[dict[str, Any]],
    messages: list[dict[str, Any]],
    full: tuple[int, ...],
    tools: Any,
    family: str,
) -> tuple[int, ...]:
    """The ids of a whole render after the model's turn that the builder leaves to whoever wrote the turn."""
    message, runtime = messages[-1], [*first, *tokenizer.encode("a", add_special_tokens=False)]
    try:
        merged = builders.appended_tokens(builder, past, [*past, *messages], runtime, tools)
    except Exception as error:
        raise ConfigError(
            f"turnkey.rollout.prompt=conversation: verl's {family} cannot append a {message['role']} message with this "
            f"model's chat template ({_cause(error)}): {_way_out(message)}"
        ) from error
    added = tuple(merged[len(runtime) :])
    if merged[: len(runtime)] != runtime or not added or full[-len(added) :] != added:
        raise ConfigError(
            f"turnkey.rollout.prompt=conversation: verl's {family} appends a {message['role']} message as "
            f"{tokenizer.decode(added)!r}, and this model's chat template writes {tokenizer.decode(full)!r}: "
            f"{_way_out(message)}"
        )
    return full[: -len(added)]


def _cause(error: BaseException) -> str:
    """The first error of the chain: verl retries another way, and the error of that says little."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"


def _way_out(message: dict[str, Any]) -> str:
    return f"set turnkey.rollout.observation_role=user, or {OTHERWISE[4:]}" if message["role"] == "tool" else OTHERWISE


def _generation(builder: Any, first: list[int], tools: Any) -> tuple[int, ...]:
    """The generation prompt: what the first prompts for two different messages have in common after them."""
    other = builders.first_tokens(builder, [{**ASKED, "content": "w"}], tools)
    n = 0
    while n < min(len(first), len(other)) and first[-n - 1] == other[-n - 1]:
        n += 1
    return tuple(first[len(first) - n :])
