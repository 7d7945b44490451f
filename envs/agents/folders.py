"""The folders of an episode: what an agent writes is its own and goes with it."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def episode_folder() -> Iterator[Path]:
    """A new folder with empty ``app``, ``home`` and ``tmp`` in it, for its owner alone; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="turnkey-agent-"))
    try:
        for name in ("app", "home", "tmp"):
            (folder / name).mkdir()
        yield folder
    finally:
        shutil.rmtree(folder, onerror=_make_writable)


def _make_writable(function: Any, path: str, _: Any) -> None:
    """Remove what is in a folder that the agent has made read-only; what cannot be removed stays."""
    parent = os.path.dirname(path)
    try:
        os.chmod(parent, stat.S_IRWXU)
        os.chmod(path, stat.S_IRWXU)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)
    except OSError:
        pass
