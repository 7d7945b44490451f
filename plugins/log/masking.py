"""Configuration and texts without their secrets, for files that people share.

A secret is known by the role of its field, by the name that it stands under, by what it looks like, or by being the
value of a variable of this process whose name is one of a secret.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

MASK = "***"
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SECRET = re.compile(
    r"(^|[_.-])(tokens?|passwd|pwd|pass|passphrase|secrets?|credentials?|auth|authorization|bearer|cookies?|headers|sas"
    r"|pats?|webhooks?|dsn|jwt)($|[_.-])|password|(api|access|private|secret)[_-]?key",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"[A-Z0-9_]+_KEY")
_LOGIN_OPTIONS = ("-u", "--user", "--proxy-user")
_COUNT = re.compile(r"\d{1,7}")
"""a number of tokens, not a token"""
_VALUE = r"""("[^"]*"|'[^']*'|[^\s&,;'"#)}\]]+)"""
_NAMED = [re.compile(rf"{name}{_VALUE}") for name in (r"([\w.-]+)(=)", r"(?<![\w.-])(-[\w.-]+)( +)(?!-)")]
"""``NAME=value`` and ``--name value`` in a text"""
_REFERENCE = re.compile(r"\$\{(?!oc\.env)[^}]*\}")
"""of a configuration to another key of it"""
_LOOKS: tuple[tuple[str, str], ...] = (
    (r"//[^\s/?#]*@", f"//{MASK}@"),  # a login in an address; of several @ the last ends it
    (r"//[^\s@:/]+:(?!\d*(?:[/?#\s]|$))[^\s@]*@", f"//{MASK}@"),  # with a slash in the password
    (r"(?<![\w./@-])[^\s:/@=,'\"]+:[^\s/@]+@(?=[\w.-]+:\d)", f"{MASK}@"),  # a proxy without a scheme
    (r"(?i)(\b(?:proxy-)?authorization|\bx-api-key|\bcookie)(\s*:\s*)[^'\"\n]+", rf"\1\2{MASK}"),
    (r"(?i)\b(bearer|basic)(\s+)[\w.+/=~-]{8,}", rf"\1\2{MASK}"),
    (r"(?i)([?&][\w.-]*(?:key|token|secret|sig|sas|passw|auth)[\w.-]*=)[^&#\s]+", rf"\1{MASK}"),
    (r"(?i)(https?://(?:hooks\.|[^\s/]*webhook)[^\s/]*/)[^\s'\"]+", rf"\1{MASK}"),
    (r"(?i)(https?://[^\s'\"]*/(?:web)?hooks?/)[^\s'\"]+", rf"\1{MASK}"),
    (r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*-----|\Z)", MASK),
    (r"\b(?:gh[pousr]_|github_pat_|glpat-|hf_|npm_|pypi-)[\w-]{16,}", MASK),
    (r"\b(?:sk-|xox[a-z]-|xapp-|[rsp]k_(?:live|test)_|SG\.|ya29\.|dop_v1_)[\w.-]{10,}", MASK),
    (r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bAIza[\w-]{30,}|\beyJ[\w-]{8,}\.[\w-]{8,}(?:\.[\w-]*)?", MASK),
)
_OF_FORM = [(re.compile(pattern), instead) for pattern, instead in _LOOKS]


def masked(value: Any) -> Any:
    """Plain data without secrets, also where one that stands under such a name is repeated in another text."""
    repeated = sorted({*_under_names(value), *_under_names(_variables())}, key=len, reverse=True)
    return _masked(value, "", False, repeated)


def _variables() -> dict[str, Any]:
    """Those of this process; a list of headers, as ``OTEL_EXPORTER_OTLP_HEADERS``, also header by header."""
    headers = {
        name: [unquote(header.partition("=")[2].strip()) for header in value.split(",")]
        for name, value in os.environ.items()
        if name.endswith("_HEADERS")
    }
    return {**os.environ, "headers": headers}


def masked_json(text: str) -> str:
    """A text that may hold JSON, as :func:`masked`."""
    try:
        value: Any = json.loads(text)
        result = masked(value)
    except (ValueError, RecursionError):
        return masked(text)
    return text if result == value else json.dumps(result)


def is_secret(name: str) -> bool:
    """Whether what stands under this name is a secret, by the name."""
    return bool(_SECRET.search(_CAMEL.sub("_", name)) or _VARIABLE.fullmatch(name.rpartition(".")[2]))


def _masked(value: Any, key: str, secret: bool, repeated: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _masked(entry, at := f"{key}.{name}".lstrip("."), secret or _hides(at), repeated)
            for name, entry in value.items()
        }
    if isinstance(value, list | tuple):
        before: Sequence[Any] = ["", *value]
        return [
            _masked(entry, key, secret or _announces(name, entry), repeated)
            for name, entry in zip(before, value, strict=False)
        ]
    if not isinstance(value, str) or not value or _REFERENCE.fullmatch(value):
        return value
    return MASK if secret else _without(value, repeated)


def _hides(key: str) -> bool:
    """Whether what stands under a key is a secret: by the role of its field, or by a name that is not a field's."""
    from verl_turnkey.plugins.config.leaves import leaf_of  # with the environments; every process of verl masks

    leaf = leaf_of(key)
    inside = key if leaf is None else key.removeprefix(leaf.key).lstrip(".")
    if leaf and leaf.secret and leaf.secret.hides(tuple(inside.split(".")) if inside else ()):
        return True
    return bool(inside) and is_secret(inside)


def _without(text: str, repeated: Sequence[str]) -> str:
    for secret in repeated:
        text = text.replace(secret, MASK)
    for pattern, instead in _OF_FORM:
        text = pattern.sub(instead, text)
    for pattern in _NAMED:
        text = pattern.sub(_named, text)
    return text


def _named(match: re.Match[str]) -> str:
    name, sign, value = match.groups()
    return f"{name}{sign}{MASK}" if is_secret(name.lstrip("-")) and not _COUNT.fullmatch(value) else match[0]


def _announces(name: Any, value: Any) -> bool:
    """Whether a word of a command says that the next one is a secret."""
    if not isinstance(name, str) or not name.startswith("-") or "=" in name or not isinstance(value, str):
        return False
    return (is_secret(name) and not _COUNT.fullmatch(value)) or (name in _LOGIN_OPTIONS and ":" in value)


def _under_names(value: Any, key: str = "", secret: bool = False) -> Iterator[str]:
    """The texts under names of secrets that are too long and mixed to be ordinary words."""
    if isinstance(value, Mapping):
        for name, entry in value.items():
            at = f"{key}.{name}".lstrip(".")
            yield from _under_names(entry, at, secret or _hides(at))
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _under_names(entry, key, secret)
    elif secret and isinstance(value, str) and len(value) >= 8 and re.search(r"\d", value) and "${" not in value:
        yield value
