"""Example turns in prompts (``turnkey.rollout.examples``): what the agent sees there, and what it should answer.

A small model writes hardly any valid action without an example. In a conversation the examples are real turns, before
the first message; a template shows them as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.prompting.actions import CALLS, TOOL_CALL, TOOLS, load_parser
from verl_turnkey.envs.prompting.prompts import build_messages, later_template

KEY = "turnkey.rollout.examples"
WRITTEN = {"tags": "<action>{}</action>", "boxed": "\\boxed{{{}}}"}
"""how a response writes an action, by format; any other format: as it is"""


@dataclass(frozen=True)
class ExampleTurn:
    """One turn: an observation, and the response to it."""

    observation: str
    action: str | None = None
    """what the response is to say; it is written in the action format"""
    response: str | None = None
    """the whole response instead, thoughts included"""
    task: str | None = None
    """null: the task of the episode. A turn with a task begins an example of its own"""
    admissible: list[str] = field(default_factory=list)
    """the possible actions, where prompts show them"""

    def __post_init__(self) -> None:
        if (self.action is None) == (self.response is None):
            raise ConfigError("action: expected either an action or a response")

    def written(self, fmt: str) -> str:
        """The response in the action format ``fmt``."""
        return self.response if self.response is not None else WRITTEN.get(fmt, "{}").format(self.action)


def check_examples(turns: Iterable[ExampleTurn], fmt: str) -> None:
    """Refuse a turn in which the agent loop would read no action, or a different one.

    Raises:
        ConfigError: names the turn, what was read in it, and why.
    """
    if fmt == TOOL_CALL:  # shown as text: the model's template writes the call
        if wrong := [n for n, turn in enumerate(turns) if turn.action is None]:
            raise ConfigError(f"{KEY}[{wrong[0]}]: with turnkey.rollout.action_format={TOOL_CALL} give the action")
        return
    if fmt == TOOLS:
        if wrong := [n for n, turn in enumerate(turns) if turn.response is None]:
            raise ConfigError(
                f"{KEY}[{wrong[0]}]: with turnkey.rollout.action_format={TOOLS} give the response, the whole text that "
                "the model should write, calls included"
            )
        return
    parser = load_parser(fmt)
    for n, turn in enumerate(turns):
        parsed = parser(turn.written(fmt), turn.admissible or None)
        if parsed.action is None or turn.action not in (None, parsed.action):
            read = parsed.reason if parsed.action is None else f"the action {parsed.action!r} would be read"
            raise ConfigError(
                f"{KEY}[{n}]: {turn.written(fmt)!r} is not an example of turnkey.rollout.action_format={fmt}: {read}. "
                "Give the whole text that the model should write as response"
            )


@dataclass(frozen=True)
class Examples:
    """The example turns of one run, as its prompts show them.

    Args:
        fmt: ``turnkey.rollout.action_format``.
        template: text of ``turnkey.rollout.template``.
        instruction: how to write an action.
        conversation: whether prompts are a conversation.
    """

    turns: Sequence[ExampleTurn]
    fmt: str
    template: str
    instruction: str
    conversation: bool

    @property
    def text(self) -> str:
        """For the field ``{examples}`` of a template; empty where the examples are turns."""
        if not self.turns or (self.conversation and self.fmt not in CALLS):
            return ""
        blocks = [
            "\n".join(
                [
                    *([f"Task: {turn.task}"] if turn.task else []),
                    f"Observation: {turn.observation}",
                    *([f"Possible actions: {', '.join(turn.admissible)}"] if turn.admissible else []),
                    f"Call of act: {turn.action}" if self.fmt == TOOL_CALL else f"Answer: {turn.written(self.fmt)}",
                ]
            )
            for turn in self.turns
        ]
        return "\n\n".join(["Examples of what you see and what you answer:", *blocks])

    def messages(self, task: str) -> list[dict[str, Any]]:
        """The turns as messages, for an episode with this task; empty where the examples are text."""
        if not self.conversation or self.fmt in CALLS:
            return []
        messages: list[dict[str, Any]] = []
        step = 0
        for turn in self.turns:
            begins = not messages or turn.task is not None
            step = 1 if begins else step + 1
            messages += build_messages(
                system=None,
                template=self.template if begins else later_template(self.template),
                task=turn.task or task,
                history=(),
                observation=turn.observation,
                admissible=turn.admissible,
                instruction=self.instruction,
                step=step,
            )
            messages.append({"role": "assistant", "content": turn.written(self.fmt)})
        return messages


NONE = Examples((), "", "", "", conversation=False)
