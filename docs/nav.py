"""A hook of mkdocs: patterns in ``nav``, so that the page of a new method or environment is there by itself.

``envs/*.md`` stands for the pages of that folder in alphabetical order, ``methods/*.md (core)`` for those of them
whose first lines name the tier ``core``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PATTERN = re.compile(r"(?P<files>\S*\*\S*)(?: \((?P<tier>\w+)\))?")
TIER = re.compile(r"[Tt]ier\s+\[(\w+)\]")


def on_config(config: Any) -> Any:
    """mkdocs calls this once, with its configuration."""
    config.nav = _expand(config.nav, Path(config.docs_dir))
    return config


def _expand(nav: Any, docs: Path) -> Any:
    if isinstance(nav, dict):
        return {title: _expand(entry, docs) for title, entry in nav.items()}
    if isinstance(nav, list):
        return [page for entry in nav for page in _pages(entry, docs)]
    return nav


def _pages(entry: Any, docs: Path) -> list[Any]:
    pattern = PATTERN.fullmatch(entry) if isinstance(entry, str) else None
    if pattern is None:
        return [_expand(entry, docs)]
    pages = sorted(docs.glob(pattern["files"]))
    return [page.relative_to(docs).as_posix() for page in pages if pattern["tier"] in (None, _tier(page))]


def _tier(page: Path) -> str | None:
    tier = TIER.search(page.read_text(encoding="utf-8"))
    return tier[1] if tier else None
