"""The folders of an episode: what an agent writes there is removed with them. The state of its files.

While the gateway answers a request, the agent waits: the folder is still. Equal digests mean equal files, whatever the
agent has read or written before, so two episodes of a task are in the same state as soon as their folders agree.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import tempfile
import time
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


IGNORED = frozenset({".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".cache", "node_modules"})
"""names of folders that hold timestamps, or files that can be rebuilt"""
MOST_FILES = 50_000
LARGE_BYTES = 1 << 24
"""of a larger file only the size, the first and the last megabyte count"""

_MEGABYTE = 1 << 20
_RACY_NS = 50_000_000  # a file that changed so shortly before it was read may change again within a tick of its clock


class WorkspaceState:
    """The keys of one episode's states. Not thread-safe: one call at a time.

    Args:
        folder: the working folder, seen from outside of a sandbox. Links in it are not followed.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._contents: dict[str, tuple[tuple[int, int, int], bytes]] = {}
        """path -> what ``stat`` said when it was read, and the digest of its content"""

    def key(self, last_call: str | None) -> str | None:
        """The key before a turn: 16 hexadecimal digits and the name of the last call; reads what has changed.

        None: the folder is not there, or holds more than 50,000 files.
        """
        if (contents := self._read()) is None:
            return None
        digest = hashlib.sha1()
        for path, (kind, content) in contents.items():
            digest.update(b"%s\0%s\0%s\0" % (os.fsencode(path), kind.encode(), content))
        return f"{digest.hexdigest()[:16]} {last_call or ''}".rstrip()

    def digests(self) -> dict[str, str] | None:
        """Path -> digest of the content of each file; None as for :meth:`key`."""
        contents = self._read()
        return None if contents is None else {path: content.hex() for path, (_, content) in contents.items()}

    def _read(self) -> dict[str, tuple[str, bytes]] | None:
        """Path -> kind and digest of each file, sorted; reads what has changed."""
        files: list[tuple[str, os.DirEntry[str]]] = []
        todo = [""]
        while todo:
            below = todo.pop()
            try:
                with os.scandir(self._folder / below) as entries:
                    children = [(os.path.join(below, entry.name), entry) for entry in entries]
            except OSError:  # a folder that its agent has locked or removed
                if not below:
                    return None
                continue
            for path, entry in children:
                if not entry.is_dir(follow_symlinks=False):
                    files.append((path, entry))
                elif entry.name not in IGNORED:
                    todo.append(path)
            if len(files) > MOST_FILES:
                return None
        contents, seen = {}, {}
        for path, entry in sorted(files, key=lambda file: file[0]):
            try:
                status = entry.stat(follow_symlinks=False)
                content = self._content(path, status)
            except OSError:
                continue
            seen[path] = self._seen(status), content
            contents[path] = "x" if status.st_mode & stat.S_IXUSR and stat.S_ISREG(status.st_mode) else "-", content
        now = time.time_ns()
        self._contents = {path: value for path, value in seen.items() if now - value[0][0] > _RACY_NS}
        return contents

    @staticmethod
    def _seen(status: os.stat_result) -> tuple[int, int, int]:
        return max(status.st_mtime_ns, status.st_ctime_ns), status.st_size, status.st_ino

    def _content(self, path: str, status: os.stat_result) -> bytes:
        seen, content = self._contents.get(path, (None, b""))
        if seen == self._seen(status):
            return content
        whole = self._folder / path
        if stat.S_ISLNK(status.st_mode):
            return hashlib.sha1(os.fsencode(os.readlink(whole))).digest()
        if not stat.S_ISREG(status.st_mode):
            return b"special"
        digest = hashlib.sha1()
        with open(os.open(whole, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if status.st_size > LARGE_BYTES:
                digest.update(b"%d" % status.st_size + file.read(_MEGABYTE))
                file.seek(-_MEGABYTE, os.SEEK_END)
            while chunk := file.read(_MEGABYTE):
                digest.update(chunk)
        return digest.digest()
