"""The user's files that a start of a run read: modules, agents, templates, tools, by hash; packages by version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from verl_turnkey.plugins.log.writer import sha256

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
