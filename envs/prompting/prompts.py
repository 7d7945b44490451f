"""The prompt of one step: a template, the last turns, and a token budget that cuts neither task nor observation."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.advantage.text_files import read_text
from verl_turnkey.envs.errors import PromptTooLongError
from verl_turnkey.envs.prompting.memory import Memory, PromptHistory, PromptTurn

FIELDS = ("task", "examples", "summary", "taken", "shown", "history", "step", "observation", "admissible", "format")
LINE_FIELDS = ("step", "observation", "action")
LINE = "{observation}\nAction: {action}"
TEMPLATES = Path(__file__).parent / "templates"
_FIELD = re.compile(r"\{([a-z_]+)\}")
_OF_A_STEP = re.compile(r"\{(observation|admissible)\}")


def check_fields(text: str, fields: Sequence[str], needs: str, what: str) -> None:
    """Raise ValueError if ``text`` has a field that is not one of ``fields``, or lacks the field ``needs``."""
    used = _FIELD.findall(text)
    for field in used:
        if field not in fields:
            raise ValueError(
                f"{what} has an unknown field {{{field}}}{did_you_mean(field, fields) or '.'} "
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
    system: str | None,
    template: str,
    task: str,
    history: Sequence[PromptTurn],
    observation: str,
    admissible: Sequence[str] | None,
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
