"""The starts of a run's trainer: what each is called, and what it says of itself in the log's folder."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import socket
import threading
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_turnkey.advantage.text_files import write_text
from verl_turnkey.plugins.notices import logger

SEGMENT = re.compile(r"\d{8}T\d{6}_[0-9a-f]{4}")
UNNAMED = "00000000T000000_0000"
"""of a run whose driver has named none"""


def new_segment() -> str:
    """A name for a start of the trainer: its UTC time and four random digits, so that later ones sort behind."""
    return f"{datetime.now(timezone.utc):%Y%m%dT%H%M%S}_{secrets.token_hex(2)}"


def write_segment(folder: Path, segment: str, facts: Mapping[str, Any]) -> None:
    """Write ``segments/<segment>.json``; ``facts["resumed_from"]``: the last step that it takes over, 0 for none.

    Raises:
        OSError: it cannot be written.
    """
    write_json(private(folder, "segments") / f"{segment}.json", {"segment": segment, **facts})


def look_for(process: Any, folder: str, segment: str) -> None:
    """Run inside a process of the run: warn if its machine does not see what the trainer wrote of its start.

    Nobody waits for that, since a mount may hang.
    """
    threading.Thread(target=look, args=(Path(folder), segment), name="look for the log", daemon=True).start()


def look(folder: Path, segment: str) -> None:
    if not (path := folder / "segments" / f"{segment}.json").exists():
        logger.warning(
            "turnkey.log.trajectories: %s, which the trainer writes, is not to be seen on %s, where its part of "
            "the log stays: choose a folder that all nodes share",
            *(path, socket.gethostname()),
        )


def read_segments(folder: Path) -> dict[str, dict[str, Any]]:
    """Name -> what stands in its file, the earliest first; a file that cannot be read is left out."""
    segments = {}
    for path in sorted((folder / "segments").glob("*.json")):
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(facts, dict) and SEGMENT.fullmatch(path.stem):
            segments[path.stem] = facts
    return segments


def sha256(path: Path) -> str:
    """Of a file's content."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a file as a whole."""
    write_text(path, json.dumps(content, indent=1, ensure_ascii=True, default=str) + "\n")


def private(folder: Path, *below: str) -> Path:
    """``folder/below/...``; folders that are made are their owner's alone, since texts of users may be in the log."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for name in ("", *below):
        folder = folder / name
        folder.mkdir(0o700, exist_ok=True)
    return folder
