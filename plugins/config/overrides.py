"""Writes and reads ``key=value``, an override in Hydra's grammar. Quotes for a shell are a second layer around it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from verl_turnkey.advantage import ConfigError

# Text that Hydra reads unchanged anywhere, unless it is a number, a boolean or null: saves a call of the parser.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_/.-]*")


def override(key: str, value: object) -> str:
    """``key=value`` such that Hydra reads back ``value``; ``key`` may begin with one plus or two.

    ``value``: text or a path (which may hold any character), a number, a boolean, None, or lists and mappings of
    these (with identifiers as keys).
    """
    return f"{key}={literal(value)}"


def literal(value: object) -> str:
    """``value`` in Hydra's grammar; text is quoted only where Hydra would read it as something else."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{','.join(map(literal, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{key}: {literal(item)}' for key, item in value.items())}}}"
    if isinstance(value, float):
        return re.sub(r"e([-+])0+", r"e\1", repr(value))  # 1e-6, as people write it
    return _text(str(value)) if isinstance(value, str | Path) else str(value)


def read(argument: str) -> tuple[str, Any]:
    """Key (without plus) and value of the override ``argument``, as Hydra reads it; interpolations stay as they are.

    Raises:
        ConfigError: Hydra cannot read it.
    """
    try:
        parsed = _parser().parse_override(argument)
        return str(parsed.key_or_group), parsed.value()
    except HydraException as error:
        raise ConfigError(f"{argument}: Hydra cannot read this override ({' '.join(str(error).split())})") from None


def values(arguments: Iterable[str], key: str) -> list[Any]:
    """The values that overrides among ``arguments`` assign to ``key``, in order; the last one counts."""
    return [read(argument)[1] for argument in arguments if argument.lstrip("+").partition("=")[0] == key]


@cache
def _parser() -> OverridesParser:
    return OverridesParser.create()


def _text(text: str) -> str:
    return text if _reads_as_itself(text) else _quoted(text)


def _reads_as_itself(text: str) -> bool:
    """Whether Hydra reads ``text`` unchanged without quotes, in a list too."""
    if not _PLAIN.fullmatch(text):
        return False
    try:
        return _parser().parse_override(f"key=[{text}]").value() == [text]
    except HydraException:
        return False


def _quoted(text: str) -> str:
    # OmegaConf resolves ${...} in the value, and reads a backslash in front of it as an escape.
    escaped = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", text)
    # Hydra: a backslash stands for itself unless a quote follows, be it the closing one. A shell quotes with ' itself.
    quote = "'" if '"' in escaped else '"'
    return quote + re.sub(rf"(\\*)({quote}|\Z)", lambda m: m[1] * 2 + (m[2] and f"\\{quote}"), escaped) + quote
