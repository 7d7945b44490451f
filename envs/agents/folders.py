"""The folders of an episode: what an agent writes stays there and is removed with them."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path
from uuid import uuid4

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


@asynccontextmanager
async def episode_folder() -> AsyncIterator[Path]:
    """A new folder with empty ``app``, ``home`` and ``tmp`` in it, for its owner alone; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="turnkey-agent-"))
    try:
        for name in ("app", "home", "tmp"):
            (folder / name).mkdir()
        yield folder
    finally:
        await asyncio.to_thread(remove, folder)


@contextmanager
def working_folder() -> Iterator[Path]:
    """A new, empty folder that an agent works in; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="turnkey-agent-"))
    try:
        yield folder
    finally:
        remove(folder)


def remove(folder: Path) -> None:
    """Remove ``folder``, however deep it is, and what an agent has made read-only in it; what cannot be removed stays.

    Folders are moved up into ``folder`` and emptied there: nothing recurses, and no path gets long.
    """
    with suppress(OSError):
        top = os.open(folder, _OPEN)
        try:
            names = (f"{uuid4().hex}-{number}" for number in count())
            while sum(_removed(name, top, names) for name in os.listdir(top)):
                pass
        finally:
            os.close(top)
        os.rmdir(folder)


def _removed(name: str, top: int, names: Iterator[str]) -> bool:
    """Remove ``name`` from the folder ``top``, to which the folders in it move; whether anything changed."""
    changed = False
    with suppress(OSError):
        if not _is_folder(name, top):
            os.unlink(name, dir_fd=top)
            return True
        inner = os.open(name, _OPEN, dir_fd=top)
        try:
            for child in os.listdir(inner):
                with suppress(OSError):
                    if _is_folder(child, inner):
                        os.rename(child, next(names), src_dir_fd=inner, dst_dir_fd=top)
                    else:
                        os.unlink(child, dir_fd=inner)
                    changed = True
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=top)
        return True
    return changed


def _is_folder(name: str, parent: int) -> bool:
    """Whether it is a folder, and no link to one; makes it writable."""
    if not stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode):
        return False
    os.chmod(name, stat.S_IRWXU, dir_fd=parent)
    return True
