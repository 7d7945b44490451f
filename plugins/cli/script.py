"""The arguments of verl's main program in a launch script, read without running it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_turnkey.advantage import ConfigError
from verl_turnkey.advantage.text_files import read_text

MAIN = "verl.trainer.main_ppo"
CALL = re.compile(rf"^(?!\s*#).*\b{re.escape(MAIN)}(?![\w.])", re.MULTILINE)
ASSIGNMENT = re.compile(r"^[^\S\n]*(?:export\s+)?(\w+)(\+?)=(\(?)", re.MULTILINE)
PIECE = re.compile(
    r"""(?P<space>[^\S\n]+|(?<!\S)\#[^\n]*)|(?P<end>(?<!\S)\d+[<>]|[\n;<>|&)])"""
    r"""|'(?P<literal>[^']*)'|"(?P<quoted>(?:\\.|[^"\\])*)"|\\(?P<escaped>.)|(?P<plain>[^\s;<>|&)'"\\]+)""",
    re.DOTALL,
)
EXPANSION = re.compile(r"""\\([$"`\\])|\$(\w+)|\$\{(\w+)(?::?-((?:[^{}]|\{[^{}]*\})*))?\}|(\$[{(]|`)""")
"""an escape, ``$NAME``, ``${NAME}`` and ``${NAME:-default}``; last what only bash can expand"""
ARRAY = re.compile(r"\$\{(\w+)\[[@*]\]\}")
REST = ("$@", "$*")
"""the script's own arguments, passed on"""
Variables = Mapping[str, "str | list[str] | None"]
"""of the script and the environment; a list: an array; None: the value needs bash"""


def arguments(script: Path) -> list[str]:
    """The arguments of ``verl.trainer.main_ppo`` in ``script``, with variables of the script and of the environment.

    Of several assignments to a variable above the call, the last one counts, also in branches of an ``if``.
    """
    text = read_text(script, only_utf8=True).replace("\\\n", "")
    calls = list(CALL.finditer(text))
    if len(calls) != 1:
        raise ConfigError(f"{script}: expected one call of {MAIN}, found {len(calls)}: give its arguments instead")
    variables: dict[str, str | list[str] | None] = dict(os.environ)
    for assignment in ASSIGNMENT.finditer(text, 0, calls[0].start()):
        name, more, array = assignment.groups()
        try:
            words = _words(text[assignment.end() :], variables, script, array=bool(array), split=bool(array))
        except ConfigError:
            variables[name] = None  # an error only if the call uses it
            continue
        value: Any = words if array else "".join(words[:1])
        before: Any = variables.get(name) if more else None
        variables[name] = before + value if isinstance(before, type(value)) else value
    return _words(text[calls[0].end() :], variables, script)


def _words(text: str, variables: Variables, script: Path, *, array: bool = False, split: bool = True) -> list[str]:
    """The words at the beginning of ``text``, to the end of the command, or of the array, which may span lines.

    ``split``: whether unquoted variables are split at spaces, as bash does outside assignments.
    """
    words: list[str] = []
    word: str | None = None
    at = 0
    while at < len(text):
        if (piece := PIECE.match(text, at)) is None:
            raise ConfigError(f"{script}: a quote is not closed: give the arguments instead")
        at, kind, content = piece.end(), piece.lastgroup, piece[piece.lastgroup or 0]
        if kind == "end" and not (array and content == "\n"):
            break
        if kind in ("space", "end"):
            words += [] if word is None else [word]
            word = None
        elif kind in ("literal", "escaped"):
            word = (word or "") + content
        elif variable := ARRAY.fullmatch(content):
            items = variables.get(variable[1])
            if not isinstance(items, list):
                raise _needs_bash(script, content)
            words += items
        elif content not in REST:
            value = _expanded(content, variables, script)
            for number, part in enumerate(re.split(r"\s", value) if split and kind == "plain" else [value]):
                if number and word is not None:
                    words.append(word)
                    word = None
                if part or kind == "quoted":
                    word = (word or "") + part
    return words if word is None else [*words, word]


def _expanded(text: str, variables: Variables, script: Path) -> str:
    def value(match: re.Match[str]) -> str:
        escaped, plain, braced, default, unreadable = match.groups()
        name = plain or braced
        if escaped:
            return escaped
        if unreadable or not isinstance(content := variables.get(name, ""), str):
            raise _needs_bash(script, text)
        if not content and default is not None:
            return _expanded(default, variables, script)
        if name not in variables and not name.isdecimal():  # a number: an argument of the script
            raise ConfigError(f"{script} uses ${name}, which is not set: set it as for the script itself")
        return content

    return EXPANSION.sub(value, text)


def _needs_bash(script: Path, text: str) -> ConfigError:
    return ConfigError(f"{script}: {text} cannot be read without running bash: give the arguments instead")
