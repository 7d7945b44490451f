"""The prompts of one episode: an object that takes observations and the model's turns and returns the next prompt.

There are two kinds (``turnkey.rollout.prompt``). The one in this file renders each prompt anew from the template and
the last turns; the one in ``conversation.py`` appends. Both count tokens: verl would cut a long prompt from the left,
the task first.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from verl_turnkey.envs import PromptTooLongError
from verl_turnkey.envs.answers import Answer
from verl_turnkey.envs.prompting.actions import ControlTokens, ParsedAction
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
)
from verl_turnkey.plugins.config.schema import RolloutConfig
from verl_turnkey.plugins.rollout.episode import Generated, Prompt
from verl_turnkey.plugins.verl_api import builders


class PromptError(RuntimeError):
    """The model's chat template, or verl's builder for it, raised an error on the messages of a prompt."""


class Prompts(Protocol):
    """The prompts of one episode. Its methods tokenize, so they are called outside the event loop."""

    def next(self, seen: Answer, images: list[Any] | None) -> Prompt:
        """The prompt with the current observation ``seen``.

        Raises:
            PromptTooLongError: it exceeds its budget.
            SummaryError: the function of ``turnkey.rollout.summary`` failed.
        """
        raise NotImplementedError

    def heard(self, turn: Generated, parsed: ParsedAction) -> None:
        """Take the model's response to the last prompt, and the action parsed from it."""

    def fork(self) -> Prompts:
        """The prompts of a branch that begins here; both go on independently."""
        raise NotImplementedError


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

    def messages(self, task: str, seen: Answer, past: PromptHistory, step: int, images: Sequence[Any]) -> list[Any]:
        """The system message and example turns, if any, and the rendered template of step ``step``, from 1."""
        task = self.control.plain(task)
        system = [{"role": "system", "content": self.options.system}] if self.options.system else []
        now = build_messages(
            system=None,
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
        return builders.first_tokens(self.builder, messages, self.tools, images)


class TemplatePrompts:
    """Each prompt is rendered anew, from the template and the last ``turnkey.rollout.history`` turns."""

    def __init__(self, settings: PromptSettings, task: str) -> None:
        self._settings, self._task = settings, task
        self._memory = Memory(settings.options.history, settings.summarize)
        self._seen = ""

    def next(self, seen: Answer, images: list[Any] | None) -> Prompt:
        self._seen = seen.text
        step = len(self._memory.turns) + 1

        def encode(past: PromptHistory) -> list[int]:
            plain = [replace(t, observation=self._settings.control.plain(t.observation)) for t in past.turns]
            past = PromptHistory(plain, past.summary)
            return self._settings.render(self._settings.messages(self._task, seen, past, step, images or ()), images)

        ids, past = fit_prompt(encode, self._memory, self._settings.prompt_length)
        return Prompt(ids, images, cut=past != self._memory.history())

    def heard(self, turn: Generated, parsed: ParsedAction) -> None:
        whole = self._settings.options.keep_thinking
        text = history_text(parsed, turn.text, whole)
        self._memory.add(PromptTurn(self._seen, text if whole else self._settings.control.plain(text)))

    def fork(self) -> TemplatePrompts:
        return forked(self)


_P = TypeVar("_P")


def forked(prompts: _P) -> _P:
    """A copy with lists and a memory of its own; what the lists hold does not change, nor do settings and model."""
    other = copy.copy(prompts)
    for name, value in vars(prompts).items():
        if isinstance(value, list | Memory):
            setattr(other, name, value.copy())
    return other


async def guarded(call: Callable[..., Any], *args: Any) -> Any:
    """``call(*args)`` in a thread; an error of a template or a builder fails the episode, not its group."""
    try:
        return await asyncio.get_running_loop().run_in_executor(None, call, *args)
    except (PromptTooLongError, SummaryError):
        raise
    except Exception as error:
        raise PromptError(f"the prompt cannot be made: {type(error).__name__}: {error}") from error
