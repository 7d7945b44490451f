"""The traffic of real agents, recorded in ``tests/data/agents``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).with_name("data") / "agents"


def recorded(name: str) -> list[dict[str, Any]]:
    """The recorded lines, each with its whole body."""
    lines, body = [], {}
    for text in (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        body = {**{key: body[key] for key in line["repeated"]}, **line["body"]}
        lines.append({**line, "body": body})
    return lines
