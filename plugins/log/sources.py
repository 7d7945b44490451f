"""The user's files that a start of a run read: modules, agents, templates, tools; by hash, and small ones as copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from verl_turnkey.advantage.text_files import write_text
from verl_turnkey.plugins.log.masking import masked_file
from verl_turnkey.plugins.log.writer import private, sha256

FOLDER = "code"
"""in the log, of the copies"""
MOST_BYTES = 256 << 10
"""of a file that is copied"""
MOST_IN_ALL = 16 << 20
"""bytes that a start copies"""
Facts = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""key of the configuration -> name of a file -> ``path``, ``sha256``, and ``copy``, below the log; None: not copied"""


def record(log: Path, files: Mapping[str, Mapping[str, Path]]) -> Facts:
    """Copy the files of each key to the log, without secrets; a content that is there is not copied again.

    A file that cannot be read is left out; a copy that cannot be written is None.
    """
    room = MOST_IN_ALL
    facts: dict[str, dict[str, dict[str, Any]]] = {}
    for key, of_key in files.items():
        for name, path in of_key.items():
            with suppress(OSError):
                fact: dict[str, Any] = {"path": str(path), "sha256": sha256(path), "copy": None}
                facts.setdefault(key, {})[name] = fact
                size = path.stat().st_size
                if size <= min(room, MOST_BYTES) and (text := masked_file(path, key)) is not None:
                    copy = private(log, FOLDER) / f"{path.stem}-{fact['sha256'][:12]}{path.suffix}"
                    if not copy.exists():
                        write_text(copy, text)
                    room -= size
                    fact["copy"] = f"{FOLDER}/{copy.name}"
    return facts


def digests(facts: Facts) -> dict[str, str]:
    """Name of each file -> the beginning of its hash; of several with one name, of all."""
    of_names: dict[str, set[str]] = {}
    for of_key in facts.values():
        for name, fact in of_key.items():
            of_names.setdefault(name, set()).add(fact["sha256"][:12])
    return {name: "+".join(sorted(hashes)) for name, hashes in of_names.items()}


def changes(starts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What differs between each two consecutive starts that have ``sources``, the first being start 1.

    Returns:
        ``start``, ``resumed_from`` (step), ``file``, ``before`` and ``after``: beginnings of hashes; None: not read.
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
