"""The user's files that a start of a run read: modules, agents, templates, tools, by hash; packages by version.

Small ones are also copied into the log, without their secrets. A copy is named after its hash, so no name on record
leads out of the folder.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256 as digest_of
from itertools import pairwise
from pathlib import Path
from typing import Any

from verl_turnkey.advantage.text_files import write_text
from verl_turnkey.plugins.config.leaves import leaf_of
from verl_turnkey.plugins.log.masking import MASK, is_secret, masked, masked_json
from verl_turnkey.plugins.log.writer import private, sha256

Facts = Mapping[str, Mapping[str, Mapping[str, str]]]
"""key of the configuration -> name of a file -> ``path`` and ``sha256``; name of an installed package -> ``version``"""


def record(files: Mapping[str, Mapping[str, Path | str]]) -> Facts:
    """What is on record of the files and packages of each key; a file that cannot be read is left out."""
    facts: dict[str, dict[str, dict[str, str]]] = {}
    for key, of_key in files.items():
        for name, source in of_key.items():
            with suppress(Exception):  # costs this file only
                fact = {"version": source} if isinstance(source, str) else _hashed(source)
                facts.setdefault(key, {})[name] = fact
    return facts


def _hashed(path: Path) -> dict[str, str]:
    return {"path": str(path), "sha256": sha256(path)}


COPIES = "files"
"""folder of a log with the copies, ``<sha256 of the file><its ending>``"""
ENDINGS = (".py", ".txt", ".yaml", ".yml", ".json", ".jinja")
LARGEST, MOST_BYTES = 64 << 10, 1 << 20
"""bytes of a file that is copied, and of all copies in a log"""
LONGEST_WORD = 1000
"""characters; longer ones are data, in which a search for secrets would take minutes"""
_NAME = re.compile(r"[0-9a-f]{64}")
_TEXT_UNDER_NAME = re.compile(
    r"""(?<![\w.-])([\w.-]+)["']?\]?\s{0,40}(?::\s{0,40}[\w.\[\]]+(?: \| [\w.\[\]]+)*\s{0,40})?[:=]\s{0,40}"""
    r"""\(?\s{0,40}[bfruBFRU]{0,2}(\"\"\"|'''|["'])((?:(?!\2)[^\n])+)\2"""
)
_DEFAULT = re.compile(r"""(?:setdefault|getenv|get)\(\s*["']([\w.-]+)["']\s*,\s*(["'])((?:(?!\2)[^\n])+)\2""")
_YAML = re.compile(
    r"(?:^|[{,])[ \t-]*([\w.-]+)[ \t]*:[ \t]*(?:[>|][-+\d]*)?\s*(?:- )?([^\s#'\"{}\[\],>|][^\n,}]*)", re.MULTILINE
)


def keep_copies(facts: Facts, log: Path) -> None:
    """Copy the small text files on record that still match their hashes; skip any that cannot be read or written.

    The configuration of MCP servers may hold secrets under any name and is not copied.
    """
    folder = private(log, COPIES)
    left = MOST_BYTES - sum(path.stat().st_size for path in folder.iterdir())
    for key, of_key in facts.items():
        leaf = leaf_of(key)
        hidden = (".json",) if leaf is not None and leaf.secret else ()
        for fact in of_key.values():
            path = Path(fact.get("path", ""))
            if path.suffix not in ENDINGS or path.suffix in hidden:
                continue
            with suppress(OSError, ValueError):  # a UnicodeError is one of these
                if path.stat().st_size > LARGEST or (copy := folder / (fact["sha256"] + path.suffix)).exists():
                    continue
                content = path.read_bytes()
                text = content.decode()
                if max(map(len, text.split()), default=0) > LONGEST_WORD:
                    continue
                text = without_secrets(text, path.suffix)
                size = len(text.encode())
                if digest_of(content).hexdigest() == fact["sha256"] and size <= left:
                    write_text(copy, text)
                    left -= size


def without_secrets(text: str, ending: str) -> str:
    """A file's text as :func:`masked`, and without the texts that stand under the name of a secret."""
    patterns = (_TEXT_UNDER_NAME, _DEFAULT)
    secrets = [match[3] for pattern in patterns for match in pattern.finditer(text) if is_secret(match[1])]
    if ending in (".yaml", ".yml"):
        secrets += [match[2].strip() for match in _YAML.finditer(text) if is_secret(match[1])]
    for secret in sorted({*secrets}, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", MASK, text)
    return masked_json(text) if ending == ".json" else masked(text)


def copies(facts: Facts, log: Path) -> dict[str, Path]:
    """Name of each file -> its copy in the log, where there is one; a name of several files has none."""
    places: dict[str, set[Path]] = {}
    for of_key in facts.values():
        for name, fact in of_key.items():
            ending = Path(str(fact.get("path"))).suffix
            if _NAME.fullmatch(str(fact.get("sha256"))) and ending in ENDINGS:
                places.setdefault(name, set()).add(log / COPIES / (fact["sha256"] + ending))
    single = {name: min(paths) for name, paths in places.items() if len(paths) == 1}
    return {
        name: path
        for name, path in single.items()
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= MOST_BYTES
    }


def digests(facts: Facts) -> dict[str, str]:
    """Name of each file -> the beginning of its hash, of a package -> its version; of several with one name, of all."""
    of_names: dict[str, set[str]] = {}
    for of_key in facts.values():
        for name, fact in of_key.items():
            of_names.setdefault(name, set()).add(fact.get("version") or fact["sha256"][:12])
    return {name: "+".join(sorted(hashes)) for name, hashes in of_names.items()}


def changes(starts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What differs between each two consecutive starts that have ``sources``, the first being start 1.

    Returns:
        ``start``, ``resumed_from`` (step), ``file``, ``before`` and ``after``: beginnings of hashes, or
        versions; None: not read.
    """
    recorded = [(number, start) for number, start in enumerate(starts, 1) if "sources" in start]
    rows = []
    for (_, earlier), (number, later) in pairwise(recorded):
        before, after = digests(earlier["sources"]), digests(later["sources"])
        for name in sorted({*before, *after}):
            if before.get(name) != after.get(name):
                at = {"start": number, "resumed_from": later.get("resumed_from"), "file": name}
                rows.append({**at, "before": before.get(name), "after": after.get(name)})
    return rows
