"""The folder in which adapters keep generated games and lists of games between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """``$TURNKEY_CACHE/name``, by default ``~/.cache/verl-turnkey/name``; it need not exist yet."""
    chosen = os.environ.get("TURNKEY_CACHE")
    shared = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "verl-turnkey"
    return (Path(chosen) if chosen else shared) / name
