"""Notes that people write on episodes: lines of JSON beside the tables of the log; an episode has its last one."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

FILE = "notes.jsonl"
LONGEST = 10_000
"""characters of a note"""


def read_notes(log: Path) -> dict[str, str]:
    """Episode -> its note; lines that are damaged are left out."""
    notes: dict[str, str] = {}
    try:
        lines = (log / FILE).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return notes
    for line in lines:
        if note := _parsed(line):
            notes[note["episode"]] = note["note"]
    return {episode: text for episode, text in notes.items() if text}


def write_note(log: Path, sent: bytes) -> None:
    """Append a note, ``{"episode": ..., "note": ...}``; an empty one removes the one before.

    Raises:
        ValueError: it is something else, or too long.
        OSError: the folder cannot be written.
    """
    note = _parsed(sent.decode("utf-8", errors="replace"))
    if note is None or len(note["note"]) > LONGEST:
        raise ValueError(f'expected {{"episode": TEXT, "note": TEXT}}, the note of at most {LONGEST} characters')
    record = json.dumps({"episode": note["episode"], "note": note["note"], "time": round(time.time(), 3)})
    line = f"\n{record}\n".encode()  # a part of a line may be before it
    file = os.open(log / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        if os.write(file, line) < len(line):  # at once: two readers may write notes
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)


def writable(log: Path) -> bool:
    """Whether this user may write notes there."""
    return os.access(log / FILE if (log / FILE).exists() else log, os.W_OK)


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        note = json.loads(line)
    except (ValueError, RecursionError):
        return None
    texts = isinstance(note, dict) and all(isinstance(note.get(name), str) for name in ("episode", "note"))
    return note if texts else None
