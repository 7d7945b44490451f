"""A hook of mkdocs: patterns in ``nav``, so that the page of a new method or environment is there by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """mkdocs calls this once, with its configuration."""
    config.nav = _expand(config.nav, Path(config.docs_dir))
    return config


def _expand(nav: Any, docs: Path) -> Any:
    if isinstance(nav, dict):
        return {title: _expand(entry, docs) for title, entry in nav.items()}
    if isinstance(nav, list):
        return [entry for item in nav for entry in (_pages(item, docs) if "*" in item else [_expand(item, docs)])]
    return nav


def _pages(pattern: str, docs: Path) -> list[str]:
    return sorted(page.relative_to(docs).as_posix() for page in docs.glob(pattern))
