"""Configuration without its secrets, for files that people share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

MASK = "***"
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET = re.compile(
    r"(^|[_.-])(tokens?|passwd|pwd|secrets?|credentials?|auth|authorization|bearer|cookies?|headers|sas)($|[_.-])"
    r"|password|(api|access|private|secret)[_-]?key",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"[A-Z0-9_]+_KEY")
_LOGIN = re.compile(r"//[^/@\s]+@")
_QUERY = re.compile(r"([?&][\w.-]*(?:key|token|secret|sig|sas|passw|auth)[\w.-]*=)[^&#\s]+", re.IGNORECASE)


def masked(value: Any, secret: bool = False) -> Any:
    """Plain data without secrets: texts under names like ``api_key``, after ``--token``, and those in addresses."""
    if isinstance(value, Mapping):
        return {key: masked(entry, secret or is_secret(str(key))) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        before: Sequence[Any] = ["", *value]
        return [masked(entry, secret or _is_option(name)) for name, entry in zip(before, value, strict=False)]
    if isinstance(value, str) and value:
        return MASK if secret else _QUERY.sub(rf"\1{MASK}", _LOGIN.sub(f"//{MASK}@", value))
    return value


def masked_json(text: str) -> str:
    """A text that may hold JSON, as :func:`masked`."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return masked(text)
    result = masked(value)
    return text if result == value else json.dumps(result)


def is_secret(name: str) -> bool:
    """Whether what stands under this name is a secret, by the name."""
    return bool(_SECRET.search(_CAMEL.sub("_", name)) or _VARIABLE.fullmatch(name))


def _is_option(name: Any) -> bool:
    return isinstance(name, str) and name.startswith("-") and "=" not in name and is_secret(name)
