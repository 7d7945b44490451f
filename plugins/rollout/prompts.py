"""The prompts of one episode: an object that takes observations and the model's turns and returns the next prompt.

There are two kinds (``turnkey.rollout.prompt``). :class:`TemplatePrompts` renders each prompt anew from the template
and the last turns; :class:`ConversationPrompts` appends. Both count tokens: verl would cut a long prompt from the left,
the task first.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from verl_turnkey.envs import EnvironmentFailure, PromptTooLongError
from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.prompting.actions import TOOL_CALL, Call, ControlTokens, ParsedAction
from verl_turnkey.envs.prompting.prompts import (
    NONE,
    Examples,
    Memory,
    PromptHistory,
    PromptTurn,
    Summarize,
    SummaryError,
    build_messages,
    fit_prompt,
    history_text,
    later_template,
)
from verl_turnkey.plugins.config.schema import RolloutConfig
from verl_turnkey.plugins.rollout.episode import Generated, Prompt
from verl_turnkey.plugins.rollout.token_spans import marked, spans
from verl_turnkey.plugins.rollout.turn_tail import ASKED, CALLED, TurnTail
from verl_turnkey.plugins.verl_api import builders


async def processed(loop: Any, arrays: list[Any]) -> list[Any] | None:
    """Arrays of (height, width, 3) bytes as verl's processor takes them; None for none.

    Args:
        loop: the agent loop, whose model is to see them.

    Raises:
        EnvironmentFailure: the model cannot take them.
    """
    if not arrays:
        return None
    from PIL import Image

    content = [{"type": "image", "image": Image.fromarray(array)} for array in arrays]
    if takes_messages(loop):
        return [part["image"] for part in content]
    try:
        builders.check_takes_images(loop)
        media = await loop.process_multi_modal_info([{"role": "user", "content": content}])
    except Exception as error:  # the model's processor raises its own errors; the message is passed on
        raise EnvironmentFailure(
            "images", f"the environment gives images, and this model cannot take them: {type(error).__name__}: {error}"
        ) from error
    return media["images"]


def takes_messages(loop: Any) -> bool:
    """Whether the server of an agent loop renders messages itself, as in an evaluation by Chat Completions."""
    return getattr(loop.server_manager, "takes_messages", False)


class PromptError(RuntimeError):
    """The model's chat template, or verl's builder for it, raised an error on the messages of a prompt."""


_P = TypeVar("_P", bound="Prompts")


class Prompts:
    """The prompts of one episode. ``next`` and ``heard`` tokenize, so they are called outside the event loop."""

    _settings: PromptSettings

    def next(self, seen: Answer, images: list[Any] | None, last: bool = False) -> Prompt:
        """The prompt with the current observation ``seen``; ``last``: of the episode's last turn.

        Raises:
            PromptTooLongError: it exceeds its budget.
            SummaryError: the function of ``turnkey.rollout.summary`` failed.
        """
        raise NotImplementedError

    def heard(self, turn: Generated, parsed: ParsedAction) -> None:
        """Take the model's response to the last prompt, and the action parsed from it."""
        raise NotImplementedError

    def take_tools(self, tools: list[dict[str, Any]]) -> None:
        """From the next prompt on show ``tools`` instead of those before."""
        self._settings = replace(self._settings, tools=tools)

    def fork(self: _P) -> _P:
        """The prompts of a branch that begins here; both go on independently."""
        other = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list | Memory):  # what a list holds does not change, nor do settings and model
                setattr(other, name, value.copy())
        return other


@dataclass(frozen=True)
class PromptSettings:
    """The settings and tools that prompts are made with.

    Args:
        template: text of ``turnkey.rollout.template``.
        instruction: how to write an action.
        tools: for the chat template; None: actions are text.
        builder: verl's continuous-token builder of the model.
        control: makes control tokens in texts of the environment plain.
        prompt_length: ``data.max_prompt_length``.
        response_length: ``data.max_response_length``.
        examples: turns that every prompt shows before those of the episode.
        by_messages: whether the server gets messages; the ids then render their texts alone, and only measure them.
        marks_observations: whether prompts of conversations say which of their tokens are an observation's.
    """

    options: RolloutConfig
    template: str
    summarize: Summarize | None
    instruction: str
    tools: list[dict[str, Any]] | None
    builder: Any
    control: ControlTokens
    prompt_length: int
    response_length: int
    examples: Examples = NONE
    marks_observations: bool = False
    by_messages: bool = False
    role: Any = None
    """whose prompts these are"""

    def messages(self, task: str, seen: Answer, past: PromptHistory, step: int, images: Sequence[Any]) -> list[Any]:
        """The system message and example turns, if any, and the rendered template of step ``step``, from 1."""
        task = self.control.plain(task)
        text = self.options.system_of(self.role)
        system = [{"role": "system", "content": text}] if text else []
        now = build_messages(
            template=self.template,
            task=task,
            history=past.turns,
            summary=self.control.plain(past.summary),
            line=self.options.history_line,
            observation=self.control.plain(seen.text),
            admissible=[self.control.plain(action) for action in seen.info["admissible"] or ()],
            instruction=self.instruction,
            examples=self.examples.text,
            step=step,
            images=images,
        )
        return [*system, *self.examples.messages(task), *now]

    def render(self, messages: list[dict[str, Any]], images: list[Any] | None) -> list[int]:
        """The token ids of a prompt of these messages."""
        if self.by_messages:
            messages, images = [{**m, "content": text_of(m["content"])} for m in messages], None
        return builders.first_tokens(self.builder, messages, self.tools, images)


class TemplatePrompts(Prompts):
    """Each prompt is rendered anew, from the template and the last ``turnkey.rollout.history`` turns."""

    def __init__(self, settings: PromptSettings, task: str) -> None:
        self._settings, self._task = settings, task
        self._memory = Memory(settings.options.history, settings.summarize)
        self._seen = ""

    def next(self, seen: Answer, images: list[Any] | None, last: bool = False) -> Prompt:
        self._seen = seen.text
        step = len(self._memory.turns) + 1

        def messages(past: PromptHistory) -> list[Any]:
            plain = [replace(t, observation=self._settings.control.plain(t.observation)) for t in past.turns]
            return self._settings.messages(self._task, seen, PromptHistory(plain, past.summary), step, images or ())

        def encode(past: PromptHistory) -> list[int]:
            return self._settings.render(messages(past), images)

        ids, past = fit_prompt(encode, self._memory, self._settings.prompt_length)
        sent = messages(past) if self._settings.by_messages else None
        return Prompt(ids, images, cut=past != self._memory.history(), messages=sent)

    def heard(self, turn: Generated, parsed: ParsedAction) -> None:
        whole = self._settings.options.keep_thinking
        text = history_text(parsed, turn.text, whole)
        self._memory.add(PromptTurn(self._seen, text if whole else self._settings.control.plain(text)))


async def guarded(call: Callable[..., Any], *args: Any) -> Any:
    """``call(*args)`` in a thread; an error of a template or a builder fails the episode, not its group."""
    try:
        return await asyncio.get_running_loop().run_in_executor(None, call, *args)
    except (PromptTooLongError, SummaryError):
        raise
    except Exception as error:
        raise PromptError(f"the prompt cannot be made: {type(error).__name__}: {error}") from error


class RolePrompts(Prompts):
    """The prompts of all roles of an episode: each has a memory of its own, and sees the states in which it moves.

    A state that names no role is seen by who moved last, or moves first: an episode of one player may name it at times.

    Args:
        make: makes the prompts of a role, from the first state in which it moves and the tools of then.
        tools: those of the start; None: actions are text.
    """

    def __init__(
        self, make: Callable[[Answer, list[dict[str, Any]] | None], Prompts], tools: list[dict[str, Any]] | None = None
    ) -> None:
        self._make, self._tools = make, tools
        self._of: dict[Any, Prompts] = {}
        self._role: Any = None

    def next(self, seen: Answer, images: list[Any] | None, last: bool = False) -> Prompt:
        self._role = self._role if seen.role is None else seen.role
        if self._role not in self._of:
            self._of[self._role] = self._of.pop(None, None) or self._make(seen, self._tools)
        return self._of[self._role].next(seen, images, last)

    def heard(self, turn: Generated, parsed: ParsedAction) -> None:
        self._of[self._role].heard(turn, parsed)

    def take_tools(self, tools: list[dict[str, Any]]) -> None:
        self._tools = tools
        for prompts in self._of.values():
            prompts.take_tools(tools)

    def fork(self) -> RolePrompts:
        other = copy.copy(self)
        other._of = {role: prompts.fork() for role, prompts in self._of.items()}
        return other


class ChatPrompts:
    """What one role is shown by a model that takes messages: its own observations, turns, task and system text.

    With ``turnkey.rollout.prompt=template`` a message from the template and the last turns, else the conversation.
    """

    def __init__(self, settings: PromptSettings, task: str) -> None:
        self._settings, self._task = settings, task
        self._memory = Memory(settings.options.history, settings.summarize)
        self._messages: list[dict[str, Any]] = []
        self._seen = ""

    def next(self, seen: Answer) -> list[dict[str, Any]]:
        """The messages with the current observation ``seen``."""
        settings, conversation = self._settings, self._settings.options.prompt == "conversation"
        step, self._seen = len(self._memory.turns) + 1, seen.text
        if not conversation or step == 1:
            past = PromptHistory() if conversation else self._memory.history()
            self._messages = settings.messages(self._task, seen, past, step, ())
        else:
            template = later_template(settings.template)
            self._messages += build_messages(
                template=template, observation=seen.text, admissible=seen.admissible, step=step
            )
        return [*self._messages]

    def answered(self, text: str, remembered: str) -> None:
        """Take the answer to the last messages, and what a template shows of it later."""
        self._memory.add(PromptTurn(self._seen, remembered))
        self._messages = [*self._messages, {"role": "assistant", "content": text}]

    def fork(self) -> ChatPrompts:
        other = copy.copy(self)
        other._memory, other._messages = self._memory.copy(), [*self._messages]
        return other


# Prompts of a conversation: the task, then by turns the observations and the model's responses as sampled.
#
# Each prompt begins, id by id, with the prompt before it and the model's response, so consecutive steps can be one row.
# There are four exceptions, named in ``Prompt.broke``: ``full`` (``turnkey.rollout.when_full`` rendered a prompt anew,
# without the oldest turns or with a summary of all), ``tools`` (the environment changed the tools, which the first
# message shows), ``thinking`` (``turnkey.rollout.thinking=drop`` cut the thoughts out of a turn) and ``boundary`` (the
# turn ended with a token that begins another message than the one that followed).


class ConversationPrompts(Prompts):
    """The conversation of one episode.

    A prompt that is rendered anew has at most ``prompt_length`` tokens. At most ``response_length`` tokens are appended
    to it, turns included. So a row has at most both together, however its steps are merged.

    Args:
        tail: how the model's turns end.
    """

    def __init__(self, settings: PromptSettings, task: str, tail: TurnTail) -> None:
        self._settings, self._task, self._tail = settings, task, tail
        self._later = later_template(settings.template)
        self._turn = settings.options.max_tokens_per_turn or settings.response_length
        self._memory = Memory(0, settings.summarize)
        self._seen: list[Answer] = []
        self._images: list[list[Any]] = []
        self._ids: list[int] = []  # the last prompt; after `heard` with the turn and the tokens that end it
        self._sampled: list[int] = []  # the last prompt and the ids that answered it
        self._starts: list[int] = []  # positions in _ids where the turns shown begin
        self._bare: list[bool] = []  # for each of these turns: is the opening of its thoughts cut off?
        self._fresh = 0  # length of _ids when the prompt was last begun anew
        self._role = "user"
        self._calls: tuple[Call, ...] = ()  # of the last turn
        self._broke: str | None = None
        self._observed: Sequence[tuple[int, int]] | None = () if settings.marks_observations else None
        self._end = 0  # length of _ids up to the end of the last turn
        self._summary = ""  # the model's own, of all turns that are no longer shown
        self._summarizing = False  # the last prompt asks for a summary
        self._reserved: int | None = None  # see _for_summary; None: not counted yet

    def next(self, seen: Answer, images: list[Any] | None, last: bool = False) -> Prompt:
        if self._summarizing:  # the summary is there
            self._summarizing = False
            self._begin_with_summary()
            return self._prompt("full")
        self._seen.append(seen)
        self._images.append(images or [])
        if len(self._seen) == 1:
            self._begin(0, [], self._settings.prompt_length)
            return self._prompt(None)
        closed, self._ids = self._ids, self._appended()
        when_full = self._settings.options.when_full
        summarizes = when_full == "summarize" and not last  # nobody would read a summary in the last turn
        if self._broke == "tools":
            try:
                return self._prompt(self._begin_with_tools())
            except PromptTooLongError:
                if not summarizes:
                    raise
                return self._summary_prompt(closed)
        if self._fits(self._turn + (self._for_summary if summarizes else 0)):
            return self._prompt(self._broken())
        if when_full == "drop_oldest":
            self._drop_oldest()
            return self._prompt("full")
        if summarizes:
            return self._summary_prompt(closed)
        raise self._too_long("a turn")

    def heard(self, turn: Generated, parsed: ParsedAction) -> None:
        if self._summarizing:
            self._summary = (parsed.content or "").strip() or self._summary
            return
        self._memory.add(PromptTurn(self._seen[-1].text, history_text(parsed, turn.text, whole=False)))
        self._calls = parsed.calls
        called = bool(parsed.calls) or (
            self._settings.options.action_format == TOOL_CALL
            and (parsed.action is not None or parsed.kind == "admissible")
        )
        self._role = "tool" if called and self._tail.tool is not None else "user"
        self._sampled, self._broke = [*self._ids, *turn.ids], None
        before, ids, bare = self._ids, turn.ids, False
        if self._settings.options.thinking == "drop" and (rest := self._tail.without_thoughts(ids)) is not None:
            opened = self._tail.opened
            bare = opened > 0 and tuple(before[-opened:]) == self._tail.generation[-opened:]
            before, ids, self._broke = before[:-opened] if bare else before, rest, "thinking"
        self._starts.append(len(before))
        self._bare.append(bare)
        self._end = len(before) + len(ids)
        self._ids = [*before, *ids, *self._tail.close(ids, self._role, bare)]

    def take_tools(self, tools: list[dict[str, Any]]) -> None:
        super().take_tools(tools)
        self._broke = "tools"

    def _prompt(self, broke: str | None, request: str | None = None) -> Prompt:
        first, end = len(self._seen) - len(self._starts) - 1, len(self._seen) - (request is not None)
        visible = [image for images in self._images[first:end] for image in images]
        cut = len(self._starts) < len(self._seen) - 1
        return Prompt(self._ids, visible or None, broke, cut, self._observed, request=request)

    def _fits(self, tokens: int) -> bool:
        """Whether so many more tokens may follow the ids."""
        return len(self._ids) - self._fresh + tokens <= self._settings.response_length

    def _too_long(self, what: str) -> PromptTooLongError:
        return PromptTooLongError(
            f"{len(self._ids) - self._fresh} tokens of the conversation leave no room for {what} of {self._turn} in "
            f"data.max_response_length={self._settings.response_length}"
        )

    def _broken(self) -> str | None:
        """Why the ids do not extend the last prompt and its response; None: they do."""
        return self._broke or (None if self._ids[: len(self._sampled)] == self._sampled else "boundary")

    # --- the model's own summary ---

    @property
    def _for_summary(self) -> int:
        """Tokens that a turn has to leave free for the summary request and the summary."""
        if self._reserved is None:
            request = self._append([self._request], "user")
            self._reserved = len(self._tail.user) + len(request) - len(self._ids) + self._turn
        return self._reserved

    @property
    def _request(self) -> dict[str, Any]:
        return {"role": "user", "content": self._settings.options.summary_request}

    def _summary_prompt(self, closed: list[int]) -> Prompt:
        """Ask for a summary after the last turn, in place of the observation, which the next prompt shows.

        ``closed``: the ids with the last turn and what ends it.
        """
        self._broke = None if self._broke == "tools" else self._broke  # the new tools come with the next prompt
        last = closed[self._starts[-1] : self._end]
        self._role = "user"
        self._ids = [*closed[: self._end], *self._tail.close(last, "user", self._bare[-1])]
        self._ids = self._append([self._request], "user")
        self._observed = self._observed and ()
        if not self._fits(self._turn):
            raise self._too_long("a summary")
        self._summarizing = True
        return self._prompt(self._broken(), self._settings.options.summary_request)

    def _begin_with_summary(self) -> None:
        """Begin anew with the summary, which loses its end where it leaves no room for task and observation."""
        while True:
            try:
                return self._begin(len(self._seen) - 1, [], self._settings.prompt_length)
            except PromptTooLongError:
                if not self._summary:
                    raise
                self._summary = self._summary[: len(self._summary) * 3 // 4]

    # --- observations ---

    def _appended(self) -> list[int]:
        """The ids, followed by what answers the last turn and by the generation prompt."""
        seen, before = self._seen[-1], len(self._ids)
        ids = self._append(self._answers(seen), self._role)
        if self._settings.marks_observations:
            others = [self._append(self._answers(other), self._role)[before:] for other in marked(seen)]
            self._observed = spans(self._tail.tokenizer, ids[before:], others)
        return ids

    def _append(self, messages: list[dict[str, Any]], role: str) -> list[int]:
        """The ids, followed by ``messages`` of that role and by the generation prompt."""
        called = [(message["name"], message["tool_call_id"]) for message in messages if "tool_call_id" in message]
        past = [ASKED, self._tail.turn(role, called or CALLED)]
        settings = self._settings
        return builders.appended_tokens(settings.builder, past, [*past, *messages], self._ids, settings.tools)

    def _answers(self, seen: Answer) -> list[dict[str, Any]]:
        """The messages after the last turn: a result per call where the template has such messages, else one."""
        plain, images = self._settings.control.plain, self._images[-1]
        results = [plain(result["content"]) for result in seen.info.get("results", ())]
        if results and self._role == "tool" and (self._tail.parallel or len(results) == 1):
            return [
                {
                    "role": "tool",
                    "name": call.name,
                    "tool_call_id": call.id or f"c{len(self._seen):04d}{n:04d}",  # Mistral's have nine characters
                    "content": _content(result, images if n == len(results) - 1 else ()),
                }
                for n, (call, result) in enumerate(zip(self._calls, results, strict=True))
            ]
        if results:
            named = zip(self._calls, results, strict=True) if len(results) > 1 else ()
            text = "\n\n".join(f"{call.name}: {result}" for call, result in named) or results[0]
            message: dict[str, Any] = {"role": self._role, "content": _content(text, images)}
        else:
            (message,) = build_messages(
                template=self._later,
                observation=plain(seen.text),
                admissible=[plain(action) for action in seen.info["admissible"] or ()],
                step=len(self._seen),
                images=images,
            )
            message["role"] = self._role
        if self._role == "tool":
            message["name"] = self._calls[0].name if self._calls else "act"
        return [message]

    def _begin_with_tools(self) -> str:
        """Render what comes before the turns anew, with the tools of now; returns what broke the conversation."""
        first, kept = len(self._seen) - 1 - len(self._starts), self._ids[self._starts[0] :]
        try:
            self._begin(first, kept, self._settings.prompt_length)
        except PromptTooLongError:
            if self._settings.options.when_full != "drop_oldest":
                raise
            self._drop_oldest()
            return "full"
        return "tools"

    def _drop_oldest(self) -> None:
        """Begin anew: the task and as many of the last turns as fit into half of a prompt's budget together."""
        turns, budget = len(self._starts), self._settings.prompt_length
        first = len(self._seen) - 1 - turns
        for dropped in range(1, turns):
            kept = self._ids[self._starts[dropped] :]
            if len(kept) <= budget // 2:
                try:
                    self._begin(first + dropped, kept, budget // 2, dropped)
                    return
                except PromptTooLongError:
                    continue
        self._begin(first + turns, [], budget, turns)

    def _begin(self, first: int, kept: list[int], budget: int, dropped: int = 0) -> None:
        """Render the task and the observation of step ``first`` anew; ``kept`` are the ids from its turn on."""
        self._memory.window = len(self._memory.turns) - first
        summary = self._summary or (self._memory.history().summary if first else "")
        past, images = PromptHistory((), summary), self._images[first]
        messages = self._settings.messages(self._task, self._seen[first], past, first + 1, images)
        ids = self._settings.render(messages, images or None)
        if kept and self._bare[dropped]:
            ids = ids[: -self._tail.opened]
        if len(ids) + len(kept) > budget:
            turns = "of other tools with all past turns" if kept else "without any past turn"
            raise PromptTooLongError(
                f"the prompt {turns} takes {len(ids) + len(kept)} tokens, data.max_prompt_length allows {budget}: "
                "raise data.max_prompt_length, or shorten the template, its examples or the observation"
            )
        moved = len(ids) - (self._starts[dropped] if kept else 0)
        self._starts = [start + moved for start in self._starts[dropped:]] if kept else []
        self._bare = self._bare[dropped:] if kept else []
        self._ids, self._fresh = [*ids, *kept], len(ids) + len(kept)


def text_of(content: Any) -> str:
    """The text of a message's content, without its images."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _content(text: str, images: Sequence[Any]) -> Any:
    image_parts = [{"type": "image", "image": image} for image in images]
    return [*image_parts, {"type": "text", "text": text}] if image_parts else text
