"""The prompt of one step: a template, the last turns, and a token budget that cuts neither task nor observation."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.errors import PromptTooLongError
from verl_turnkey.envs.prompting.actions import CALLS, TOOL_CALL, TOOLS, ParsedAction, load_parser


@dataclass(frozen=True)
class PromptTurn:
    """A past step as prompts show it."""

    observation: str
    action: str
    """what :func:`history_text` makes of the response"""


Summarize = Callable[[Sequence[PromptTurn]], str]
"""Makes a text of the turns that are no longer shown, oldest first."""


class SummaryError(RuntimeError):
    """The function of ``turnkey.rollout.summary`` raised, or did not return text."""


@dataclass(frozen=True)
class PromptHistory:
    """What one prompt shows of the past."""

    turns: Sequence[PromptTurn] = ()
    """oldest first"""
    summary: str = ""
    """of the turns before them"""


@dataclass
class Memory:
    """The turns of one episode, and how many of them a prompt shows.

    Args:
        window: turns shown at most.
        summarize: makes ``PromptHistory.summary``; None: always empty. Called once per number of turns left out.
    """

    window: int
    summarize: Summarize | None = None
    turns: list[PromptTurn] = field(default_factory=list)
    _summaries: dict[int, str] = field(default_factory=dict)

    def add(self, turn: PromptTurn) -> None:
        self.turns.append(turn)

    def copy(self) -> Memory:
        """A copy that continues independently."""
        return replace(self, turns=[*self.turns], _summaries={**self._summaries})

    @property
    def cuts(self) -> int:
        """How often the history can be made shorter: once per turn shown, and once more for the summary."""
        return min(self.window, len(self.turns)) + (self.summarize is not None)

    def history(self, cut: int = 0) -> PromptHistory:
        """The turns in the window without the ``cut`` oldest, and the summary, which is cut last.

        Raises:
            SummaryError: ``summarize`` raised, or did not return text.
        """
        length = min(self.window, len(self.turns)) - cut
        if length < 0:
            return PromptHistory()
        first = len(self.turns) - length
        return PromptHistory(self.turns[first:], self._summary(first))

    def _summary(self, turns: int) -> str:
        """Of the first ``turns`` turns, which never change, so it is made once."""
        if self.summarize is None or turns == 0:
            return ""
        if turns not in self._summaries:
            try:
                text = self.summarize(self.turns[:turns])
            except Exception as error:
                raise SummaryError(f"turnkey.rollout.summary raised {type(error).__name__}: {error}") from error
            if not isinstance(text, str):
                raise SummaryError(f"turnkey.rollout.summary must return text, not {type(text).__name__}")
            self._summaries[turns] = text
        return self._summaries[turns]


def history_text(parsed: ParsedAction, text: str, whole: bool) -> str:
    """A past turn as later prompts show it: the action, or without one the beginning of what follows the thoughts."""
    if whole:
        return text.strip() or "(nothing)"
    if parsed.action is None:
        return " ".join((text if parsed.content is None else parsed.content).split())[:80] or "(nothing)"
    return parsed.action


FIELDS = ("task", "examples", "summary", "taken", "shown", "history", "step", "observation", "admissible", "format")
LINE_FIELDS = ("step", "observation", "action")
LINE = "{observation}\nAction: {action}"
SUMMARY_REQUEST = (
    "Your context is nearly full. Write a summary of everything so far that matters for the task: what you know, what "
    "you did, what is left. You will go on with the task, this summary and what you see next; all else is forgotten."
)
TEMPLATES = Path(__file__).parent / "templates"
_FIELD = re.compile(r"\{([a-z_]+)\}")
_OF_A_STEP = re.compile(r"\{(observation|admissible)\}")


def check_fields(text: str, fields: Sequence[str], needs: str, what: str) -> None:
    """Raise ValueError if ``text`` has a field that is not one of ``fields``, or lacks the field ``needs``."""
    used = _FIELD.findall(text)
    for name in used:
        if name not in fields:
            raise ValueError(
                f"{what} has an unknown field {{{name}}}{did_you_mean(name, fields) or '.'} "
                f"Fields are {', '.join(fields)}"
            )
    if needs not in used:
        raise ValueError(f"{what} does not show the {{{needs}}}")


def load_template(name_or_path: str) -> str:
    """The text of a template: the name of one that ships with the package, or the path of a file.

    A template is plain text with the fields of :data:`FIELDS`; :func:`build_messages` says what they hold.
    """
    shipped = {path.stem: path for path in TEMPLATES.glob("*.txt")}
    path = shipped.get(name_or_path) or Path(name_or_path)
    if not path.is_file():
        raise ValueError(
            f"no prompt template {name_or_path!r}{did_you_mean(name_or_path, shipped) or '.'} "
            f"It is the path of a text file or one of {', '.join(sorted(shipped))}"
        )
    template = read_text(path)
    check_fields(template, FIELDS, "observation", f"prompt template {name_or_path!r}")
    return template


def later_template(template: str) -> str:
    """The lines of a prompt template that differ from step to step: those with the observation or the actions."""
    return "\n".join(line for line in template.split("\n") if _OF_A_STEP.search(line))


def build_messages(
    *,
    template: str,
    observation: str,
    system: str | None = None,
    task: str = "",
    history: Sequence[PromptTurn] = (),
    admissible: Sequence[str] | None = None,
    step: int | None = None,
    summary: str = "",
    line: str = LINE,
    instruction: str = "",
    examples: str = "",
    images: Sequence[Any] = (),
) -> list[dict[str, Any]]:
    """Chat messages for one step: the system text, if any, and one user message, made of ``template``.

    A line of the template whose fields are all empty is left out. Any text fits into any field, with characters that
    UTF-8 cannot hold replaced.

    Args:
        system: text of a system message; None: none.
        template: text with ``{task}``, ``{observation}`` and ``{admissible}`` (separated by commas); ``{step}``, the
            number of this step, from 1, and ``{taken}``, the number of those before it, empty on the first one;
            ``{history}``, the past turns of the prompt, one ``line`` each, ``{shown}``, their number, empty for none,
            ``{summary}`` of those before them; and ``{format}``, the ``instruction``.
        history: the past turns to show, oldest first.
        step: defaults to the one after ``history``.
        line: text of a past turn, with ``{step}``, ``{observation}`` and ``{action}``.
        instruction: how to write an action, see ``actions.INSTRUCTIONS``.
        examples: text of the field ``{examples}``; it comes first in a template that has no such field.
        images: placed before the text, in the form that chat templates of vision-language models take.
    """
    step = len(history) + 1 if step is None else step
    first = step - len(history)
    values = {
        "task": task,
        "examples": examples,
        "summary": summary,
        "taken": str(step - 1 or ""),
        "shown": str(len(history) or ""),
        "history": "\n".join(
            _fill(line, {"step": str(number), "observation": turn.observation, "action": turn.action})
            for number, turn in enumerate(history, first)
        ),
        "step": str(step),
        "observation": observation,
        "admissible": ", ".join(admissible or ()),
        "format": instruction,
    }
    if examples and "{examples}" not in template:
        template = f"{{examples}}\n\n{template}"
    lines: list[str] = []
    for text in template.strip("\n").split("\n"):
        fields = _FIELD.findall(text)
        blank_again = not text.strip() and (not lines or not lines[-1].strip())
        if not blank_again and (not fields or any(values[field] for field in fields)):
            lines.append(text)
    # Half a surrogate pair, which a decoder can leave in a text, would break the tokenizer.
    user = _fill("\n".join(lines), values).encode("utf-8", "replace").decode("utf-8")
    image_parts = [{"type": "image", "image": image} for image in images]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    return [
        *messages,
        {"role": "user", "content": [*image_parts, {"type": "text", "text": user}] if image_parts else user},
    ]


def fit_prompt(
    encode: Callable[[PromptHistory], list[int]], memory: Memory, budget: int
) -> tuple[list[int], PromptHistory]:
    """The longest prompt within ``budget`` tokens, and the history that it shows.

    ``encode`` gives the token ids of the prompt with a history. The oldest turns are cut first, then the summary; the
    task and the current observation stay whole.

    Raises:
        PromptTooLongError: not even the prompt without any history fits.
    """
    tried: dict[int, tuple[list[int], PromptHistory]] = {}

    def fits(cut: int) -> bool:
        history = memory.history(cut)
        tried[cut] = encode(history), history
        return len(tried[cut][0]) <= budget

    if fits(0):
        return tried[0]
    # Bisection: with a long history and a small budget, a linear search would tokenize it dozens of times.
    cut = bisect_left(range(memory.cuts + 1), True, lo=1, key=fits)
    if cut <= memory.cuts:
        return tried[cut]
    raise PromptTooLongError(
        f"the prompt without any history takes {len(tried[memory.cuts][0])} tokens, data.max_prompt_length allows "
        f"{budget}: raise data.max_prompt_length, or shorten the template, its examples or the observation"
    )


def _fill(text: str, values: Mapping[str, str]) -> str:
    """In one pass: braces in an observation are never taken for fields."""
    return _FIELD.sub(lambda match: values[match[1]], text)


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
    needed = {
        TOOL_CALL: ("action", ""),  # shown as text: the model's template writes the call
        TOOLS: ("response", ", the whole text that the model should write, calls included"),
    }
    if fmt in needed:
        name, hint = needed[fmt]
        if wrong := [n for n, turn in enumerate(turns) if getattr(turn, name) is None]:
            raise ConfigError(f"{KEY}[{wrong[0]}]: with turnkey.rollout.action_format={fmt} give the {name}{hint}")
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
                template=self.template if begins else later_template(self.template),
                task=turn.task or task,
                observation=turn.observation,
                admissible=turn.admissible,
                instruction=self.instruction,
                step=step,
            )
            messages.append({"role": "assistant", "content": turn.written(self.fmt)})
        return messages


NONE = Examples((), "", "", "", conversation=False)
