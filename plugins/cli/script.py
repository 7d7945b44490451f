"""The arguments of verl's main program in a launch script, read without running it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from verl_turnkey.advantage import ConfigError

MAIN = "verl.trainer.main_ppo"
ASSIGNMENT = re.compile(r"\s*(?:export\s+)?(\w+)=(.*)")
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}]*))?\})")
"""``$NAME``, ``${NAME}`` and ``${NAME:-default}``; interpolations of Hydra have a dot or a colon"""
REST = ("$@", "$*")
"""what the script passes on of its own arguments"""


def arguments(script: Path) -> list[str]:
    """What follows ``verl.trainer.main_ppo`` in ``script``, with variables of the script and of the environment.

    Raises:
        ConfigError: the script runs it not once, or uses a variable that neither sets, or a command's output.
    """
    lines = script.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    calls = [number for number, line in enumerate(lines) if MAIN in line and not line.lstrip().startswith("#")]
    if len(calls) != 1:
        raise ConfigError(f"{script}: expected one call of {MAIN}, found {len(calls)}: give its arguments instead")
    variables = dict(os.environ)
    for line in lines[: calls[0]]:
        if assignment := ASSIGNMENT.fullmatch(line):
            variables[assignment[1]] = " ".join(_words(_expanded(assignment[2], variables, script)))
    words = _words(_expanded(lines[calls[0]].partition(MAIN)[2], variables, script))
    if outputs := [word for word in words if "$(" in word or "`" in word]:
        raise ConfigError(f"{script}: {outputs[0]} has a command's output: give the arguments instead")
    return [word for word in words if word not in REST]


def _expanded(text: str, variables: Mapping[str, str], script: Path) -> str:
    def value(found: re.Match[str]) -> str:
        name = found[1] or found[2]
        if name in variables or found[3] is not None:
            return variables.get(name) or found[3] or ""
        if name.isdecimal():
            return ""  # an argument of the script
        raise ConfigError(f"{script} uses ${name}, which is not set: set it as for the script itself")

    return VARIABLE.sub(value, text)


def _words(text: str) -> list[str]:
    """The words of a command, up to the end of it."""
    reader = shlex.shlex(text, posix=True, punctuation_chars=";<>|&")
    reader.whitespace_split, words = True, []
    for word in reader:
        if set(word) <= set(";<>|&"):
            return words[:-1] if word.startswith(">") and words[-1:] in (["1"], ["2"]) else words
        words.append(word)
    return words
