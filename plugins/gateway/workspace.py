"""The files of an episode as the key of its state: ``turnkey.agent.state=workspace``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from verl_turnkey.envs.base import digest
from verl_turnkey.plugins.gateway.messages import Request

MOST_FILES = 20_000
"""of a workspace that are read"""
LARGEST = 2**20
"""bytes of a file up to which its content counts; of larger ones size and time of the last change"""


def workspace_key(request: Request, files: Mapping[str, str] | None = None) -> str:
    """The key of the files before a turn, and of the tools of the turn before it."""
    calls: list[str] = []
    for message in reversed(request.messages):
        if message.role == "assistant":
            calls = [call.name for call in message.calls]
            break
    return digest(calls, sorted((files or {}).items()))


class Workspace:
    """The folder of one episode. A file is read again only when its size or its time of change differs.

    Args:
        folder: which the agent works in.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[str, tuple[tuple[int, int], str]] = {}

    def files(self) -> dict[str, str]:
        """Path -> key of the content of each file now. Reads files, so it may block."""
        contents: dict[str, str] = {}
        for folder, folders, names in os.walk(self._folder):
            folders.sort()
            for name in sorted(names):
                if len(contents) >= MOST_FILES:
                    return contents
                path = os.path.join(folder, name)
                contents[os.path.relpath(path, self._folder)] = self._content(path)
        return contents

    def _content(self, path: str) -> str:
        try:
            status = os.lstat(path)
            if os.path.islink(path):
                return f"-> {os.readlink(path)}"
            stamp = (status.st_size, status.st_mtime_ns)
            if not os.path.isfile(path) or status.st_size > LARGEST:
                return str(stamp)
            known = self._known.get(path)
            if known is None or known[0] != stamp:
                known = stamp, blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()
                self._known[path] = known
            return known[1]
        except OSError:  # it has gone meanwhile, or must not be read
            return "?"
