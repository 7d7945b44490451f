"""Every rule of the checks as a row: id, level, message, fix.

A message is ``problem: set key=value``; ``<`` and ``>`` enclose the values that a run fills in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from string import Formatter

from omegaconf import DictConfig

from verl_turnkey.advantage.params import did_you_mean
from verl_turnkey.plugins.checks.findings import ignored, refusal
from verl_turnkey.plugins.checks.limits import COUNTS, MAY_BE_NULL
from verl_turnkey.plugins.checks.values import RANGES, value_at
from verl_turnkey.plugins.config.recipe_files import rule_texts

RANGE = "range:"
"""prefix of the ids of rules about the values of a key; the key follows"""
CHOICES = ("closest", "choices", "hint")
"""fields that end a message with the closest name, or all of them"""
_VERBS = "set|write|choose|give|drop|raise|lower|add|use|take|train|expected|pip install|either|to start over"
_FIX = re.compile(rf"(?:[:.;,]| or|\))\s((?:{_VERBS})\b.*)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Rule:
    """A rule of the checks; ``fix`` is empty if the message has none."""

    id: str
    level: str
    says: str
    fix: str = ""


@cache
def rules() -> Mapping[str, Rule]:
    """Every rule by its id, in alphabetical order, including the rules about values of verl's keys."""
    every = [*(_rule(id, texts) for id, texts in rule_texts().items()), *_ranges()]
    return {rule.id: rule for rule in sorted(every, key=lambda rule: rule.id)}


def _rule(id: str, texts: Mapping[str, str]) -> Rule:
    """A rule with ``<name>`` for the fields of its words."""
    level = texts.get("level", "error")
    if "says" in texts:
        return Rule(id, level, texts["says"], texts.get("fix", ""))
    parts, listed = [], False
    for text, field, _, _ in Formatter().parse(texts["words"]):
        listed |= field in CHOICES
        parts += [text, f"<{field}>" if field and field not in CHOICES else ""]
    words = " ".join("".join(parts).split())
    if fix := _FIX.search(words):
        return Rule(id, level, words[: fix.start()], fix[1])
    says, sign, _ = words.partition("; choices")
    way_out = "write one that the message lists" if listed or sign else "drop it" if "has no effect" in words else ""
    return Rule(id, level, says, way_out)


def _ranges() -> Iterator[Rule]:
    """The rules about the values of verl's keys."""
    expected = dict.fromkeys((*COUNTS, *MAY_BE_NULL), "a whole number, 1 or more")
    expected |= {row.key: row.expected for row in RANGES}
    for key, text in expected.items():
        yield Rule(f"{RANGE}{key}", "error", f"{key} is out of its range", f"expected {text}")


def check_ignored(config: DictConfig) -> None:
    """Refuse ids in ``turnkey.ignore`` that are unknown, or of rules that cannot be ignored."""
    for id in sorted(ignored(config)):
        rule, key = rules().get(id), id.removeprefix(RANGE)
        level = "fatal" if id.startswith(f"{RANGE}turnkey.") else rule.level if rule else ""
        if level in ("fatal", "notice"):
            raise refusal("ignore-in-vain", id=id, level=level)
        if not (rule or level) and (key == id or value_at(config, key) is None):
            raise refusal("ignore-unknown", id=id, hint=did_you_mean(id, rules()) or ".")


def as_json() -> str:
    """All rules as a JSON list of objects with the fields of :class:`Rule`."""
    return json.dumps([asdict(rule) for rule in rules().values()], indent=1)


def as_text() -> str:
    """All rules in four columns, separated by tabs."""
    return "\n".join("\t".join((rule.id, rule.level, rule.says, rule.fix)) for rule in rules().values())
