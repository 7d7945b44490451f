"""What runs leave in shared memory and the folder for temporary files, and what of it no living process uses.

Linux only: on other systems nothing is found.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SHM = Path("/dev/shm")
PROC = Path("/proc")
QUIET_SECONDS = 600.0
"""for which a leftover must not have changed: what is being made may not be open yet"""
LOOK_SECONDS = 20.0
CLEAN_SECONDS = 60.0
"""for which the end of a run waits for processes that end"""
_HEX = "[0-9a-f]"


class Kind(NamedTuple):
    """A kind of leftover."""

    what: str
    where: str
    """``shm``, or a folder below the one for temporary files"""
    name: re.Pattern[str]
    type: int
    """of the file, as in its mode"""
    users: re.Pattern[str] | None = None
    """command lines of processes that use it without holding it open; None: they hold it open"""

    @property
    def folder(self) -> Path:
        """where it is"""
        return SHM if self.where == "shm" else Path(tempfile.gettempdir()) / self.where


_RUNS = re.compile(r"ray::|vllm|verl", re.IGNORECASE)

KINDS = (
    Kind("message queue of vLLM", "shm", re.compile(rf"psm_{_HEX}{{8}}"), stat.S_IFREG),
    Kind("weights on their way to vLLM", "shm", re.compile(rf"verl_weights_{_HEX}{{32}}"), stat.S_IFREG),
    Kind("socket for weights", "", re.compile(r"rl-colocate-zmq-.+\.sock"), stat.S_IFSOCK),
    Kind("socket of vLLM", "", re.compile(rf"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"), stat.S_IFSOCK),
    Kind("meeting point of vLLM's processes", "", re.compile(rf"vllm_dist_{_HEX}{{32}}"), stat.S_IFREG, _RUNS),
    Kind("lock of a folder of checkpoints", "", re.compile(rf"ckpt_{_HEX}{{8}}\.lock"), stat.S_IFREG, _RUNS),
    Kind("logs and sockets of a Ray", "ray", re.compile(r"session_\d{4}-\d\d-\d\d_[\d_-]+"), stat.S_IFDIR),
)


class Leftover(NamedTuple):
    """A file or folder of this user that no living process uses."""

    path: Path
    what: str
    bytes: int
    """that it takes: of shared memory less than its length, where parts were never written"""
    seconds: float
    """since it changed"""


def find() -> list[Leftover]:
    """The leftovers of this user, biggest first; see :data:`QUIET_SECONDS`.

    Processes of other containers that share these folders are not seen.
    """
    there = [(path, kind) for kind in KINDS for path in _of_kind(kind)]
    used, processes, now, found = _used_by_all(), _processes(), time.time(), []
    for path, kind in there:
        with suppress(FileNotFoundError):
            changed, inside = path.lstat().st_mtime, f"{path}/"
            users = (each.began for each in processes.values() if kind.users and kind.users.search(each.command))
            if now - changed < QUIET_SECONDS or any(began <= changed for began in users):
                continue
            if not any(each == str(path) or each.startswith(inside) for each in used):
                found.append(Leftover(path, kind.what, _bytes(path), now - changed))
    return sorted(found, key=lambda each: -each.bytes)


def remove(paths: Collection[Path]) -> list[Path]:
    """Remove files and folders; returns those that could not be removed. Ray's link to a removed session goes, too."""
    left = []
    for path in paths:
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        except OSError:
            left.append(path)
        link = path.parent / "session_latest"
        if link.is_symlink() and not link.exists():
            link.unlink(missing_ok=True)
    return left


class RunFiles:
    """Context: collects what the descendants of this process hold meanwhile; :meth:`clean` removes it afterwards.

    A run on a cluster that somebody else started has no processes among the descendants, and nothing is collected.
    """

    def __init__(self) -> None:
        self._seen: set[Path] = set()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="turnkey-leftovers", daemon=True)

    def __enter__(self) -> RunFiles:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.look()

    def look(self) -> None:
        """Take note of what is held now."""
        for path in map(Path, _open_in(_descendants(os.getpid()))):
            for kind in KINDS:
                if path.parent == kind.folder and kind.name.fullmatch(path.name):
                    self._seen.add(path)

    def clean(self, seconds: float = CLEAN_SECONDS) -> None:
        """Remove what was collected and nobody holds any more; waits at most ``seconds`` for those who hold it."""
        end = time.monotonic() + seconds
        while there := {path for path in self._seen if os.path.lexists(path)}:
            held = there & set(map(Path, _used_by_all()))
            if not held or time.monotonic() >= end:
                remove(there - held)
                return
            time.sleep(0.2)

    def _watch(self) -> None:
        while not self._end.wait(LOOK_SECONDS):
            self.look()


def _of_kind(kind: Kind) -> Iterator[Path]:
    with suppress(OSError):
        for entry in os.scandir(kind.folder):
            if kind.name.fullmatch(entry.name):
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_uid == os.getuid() and stat.S_IFMT(status.st_mode) == kind.type:
                        yield Path(entry.path)


def _bytes(path: Path) -> int:
    total = path.lstat().st_blocks
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks
    return 512 * total


def _used_by_all() -> set[str]:
    """Paths that processes have open, mapped or in their command lines, and those of sockets, in this container."""
    pids = set(_processes())
    found = _open_in(pids) | set(_sockets().values())
    for pid in pids:
        with suppress(OSError):  # it has ended, or is another user's
            for line in (PROC / str(pid) / "maps").read_text(errors="replace").splitlines():
                if len(words := line.split(maxsplit=5)) == 6:
                    found.add(words[5])
            words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
            found.update(word.partition("=")[2] or word for word in words)
    return found


def _open_in(pids: Collection[int]) -> set[str]:
    """Paths of the files that ``pids`` have open, and of the sockets that they listen at."""
    sockets, found = _sockets(), set()
    for pid in pids:
        with suppress(OSError):
            for descriptor in os.listdir(PROC / str(pid) / "fd"):
                with suppress(OSError):
                    target = os.readlink(PROC / str(pid) / "fd" / descriptor)
                    found.add(sockets.get(target[8:-1], "") if target.startswith("socket:[") else target)
    return {each for each in found if each.startswith("/")}


def _sockets() -> dict[str, str]:
    """inode -> path, of sockets that have one."""
    with suppress(OSError):
        lines = (PROC / "net" / "unix").read_text(errors="replace").splitlines()[1:]
        return {words[6]: words[7] for line in lines if len(words := line.split(maxsplit=7)) == 8}
    return {}


class _Process(NamedTuple):
    parent: int
    began: float
    """Unix time in seconds"""
    command: str


def _processes() -> dict[int, _Process]:
    """The processes of this container."""
    found = {}
    with suppress(OSError):
        booted = time.time() - float((PROC / "uptime").read_text().split()[0])
        for pid in filter(str.isdecimal, os.listdir(PROC)):
            with suppress(OSError):
                # The name of the command, in parentheses, may hold anything.
                facts = (PROC / pid / "stat").read_text(errors="replace").rpartition(")")[2].split()
                command = (PROC / pid / "cmdline").read_text(errors="replace")
                began = booted + int(facts[19]) / os.sysconf("SC_CLK_TCK")
                found[int(pid)] = _Process(int(facts[1]), began, command)
    return found


def _descendants(pid: int) -> set[int]:
    """``pid`` and its descendants."""
    processes, found = _processes(), {pid}
    while more := {child for child, each in processes.items() if each.parent in found} - found:
        found |= more
    return found
