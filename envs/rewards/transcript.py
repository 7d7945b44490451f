"""The text that a scoring model reads: a template with fields for task, transcript, observation and action."""

from __future__ import annotations

import re

from verl_turnkey.advantage.params import check, did_you_mean
from verl_turnkey.envs.rewards.components import Steps

FIELDS = ("task", "transcript", "observation", "action")
_FIELD = re.compile(r"\{(\w+)\}")


def check_template(template: str, key: str) -> None:
    """Refuse a ``template``, the option ``key``, with unknown fields, or with none that shows what the agent did.

    Raises:
        ConfigError: names the field.
    """
    named = _FIELD.findall(template)
    for name in named:
        hint = did_you_mean(name, FIELDS)
        check(name in FIELDS, key, f"only fields among {', '.join(FIELDS)}{hint}", f"{{{name}}}")
    seen = {"transcript", "action"} & set(named)
    check(bool(seen), key, "to show the {transcript} or the {action}", template)


def fill(template: str, steps: Steps, max_chars: int) -> str:
    """``template`` with its fields: {observation} and {action} are those of the last of ``steps``."""
    texts = [step.text or step.action or "" for step in steps]
    values = {
        "task": steps[0].task,
        "transcript": _shortened(
            "\n\n".join(
                f"Observation {t}: {step.observation}\nAgent {t}: {words}"
                for t, (step, words) in enumerate(zip(steps, texts, strict=True), 1)
            ),
            max_chars,
        ),
        "observation": steps[-1].observation,
        "action": steps[-1].action or steps[-1].content or "(no action)",
    }
    # In one pass: text of a model or an environment is never taken for a field.
    return _FIELD.sub(lambda match: values[match[1]], template)


def _shortened(text: str, most: int) -> str:
    """``text`` without its middle when it is longer than ``most``: its beginning and its end matter most."""
    left_out = len(text) - most
    if left_out <= 0:
        return text
    head = most // 2
    return f"{text[:head]}\n[{left_out} characters left out]\n{text[head + left_out :]}"
