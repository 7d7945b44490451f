"""What the model is shown: a template, the last steps, and a budget that never costs the task or the observation."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_turnkey.envs.errors import PromptTooLongError, did_you_mean

FIELDS = ("task", "history", "observation", "admissible", "step")
TEMPLATES = Path(__file__).parent / "templates"
_FIELD = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True)
class Turn:
    """A past step: what was seen, and what was done."""

    observation: str
    action: str


def load_template(name_or_path: str) -> str:
    """The text of a template: the name of one that ships with the package, or the path of a file.

    A template is plain text with the fields ``{task} {history} {observation} {admissible} {step}``. A line whose
    fields are all empty is left out.
    """
    shipped = {path.stem: path for path in TEMPLATES.glob("*.txt")}
    path = shipped.get(name_or_path) or Path(name_or_path)
    if not path.is_file():
        raise ValueError(
            f"no prompt template {name_or_path!r}.{did_you_mean(name_or_path, shipped)} "
            f"It is the path of a text file or one of {', '.join(sorted(shipped))}"
        )
    template = path.read_text(encoding="utf-8")
    used = _FIELD.findall(template)
    for field in used:
        if field not in FIELDS:
            raise ValueError(
                f"prompt template {name_or_path!r} has an unknown field {{{field}}}."
                f"{did_you_mean(field, FIELDS)} Fields are {', '.join(FIELDS)}"
            )
    if "observation" not in used:
        raise ValueError(f"prompt template {name_or_path!r} does not show the {{observation}}")
    return template


def build_messages(
    *,
    system: str | None,
    template: str,
    task: str,
    history: Sequence[Turn],
    observation: str,
    admissible: Sequence[str] | None,
    step: int | None = None,
) -> list[dict[str, str]]:
    """Chat messages for one step: the system text, if any, and one user message.

    ``history`` is what is shown of the past, oldest first; ``step`` counts from 1 and defaults to the one after it.
    """
    values = {
        "task": task,
        "history": "\n".join(f"{turn.observation}\nAction: {turn.action}" for turn in history),
        "observation": observation,
        "admissible": ", ".join(admissible or ()),
        "step": str(len(history) + 1 if step is None else step),
    }
    lines = []
    for line in template.strip("\n").split("\n"):
        fields = _FIELD.findall(line)
        blank_again = not line.strip() and (not lines or not lines[-1].strip())
        if not blank_again and (not fields or any(values[field] for field in fields)):
            lines.append(line)
    # One pass over the template: braces in an observation are never taken for fields.
    user = _FIELD.sub(lambda match: values[match[1]], "\n".join(lines))
    messages = [{"role": "system", "content": system}] if system else []
    return [*messages, {"role": "user", "content": user}]


def fit_prompt(encode: Callable[[int], list[int]], history: int, budget: int) -> tuple[list[int], int]:
    """The longest prompt within ``budget`` tokens, and how many past steps it shows.

    ``encode(k)`` gives the token ids of the prompt with the last ``k`` steps, so that the oldest steps go first and
    the task and the current observation stay whole.

    Raises:
        PromptTooLongError: not even the prompt without history fits.
    """
    ids: list[int] = []
    for shown in range(history, -1, -1):
        ids = encode(shown)
        if len(ids) <= budget:
            return ids, shown
    raise PromptTooLongError(
        f"the prompt without any history takes {len(ids)} tokens, data.max_prompt_length allows {budget}: "
        f"raise data.max_prompt_length, or shorten the template or the observation"
    )
