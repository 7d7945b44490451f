"""Folders and files of runs: a folder belongs to one process at a time, and what ended runs left is removed.

Two runs would delete and resume from each other's checkpoints. Leftovers are in shared memory and in the folder for
temporary files, and no living process uses them. Linux only: on other systems their list is empty.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from verl_turnkey.advantage import ConfigError

LOCK, OF_CHECKPOINTS = ".lock", ".turnkey-run"


@contextmanager
def locked(folder: Path, taken: str, fix: str, name: str = LOCK) -> Iterator[None]:
    """Create ``folder`` and hold it; the operating system lets go when the process ends, however it ends.

    Where the file system cannot lock, or the folder cannot be written, nothing is held.

    Raises:
        ConfigError: another process holds it: ``taken``, which process, and ``fix``.
    """
    file = None
    try:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = (folder / name).open("a+", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise ConfigError(f"{taken} ({file.read().strip()}){fix}") from None
            file.truncate(0)
            file.write(f"process {os.getpid()} on {platform.node()}\n")
            file.flush()
        yield
    finally:
        if file is not None:
            file.close()


@contextmanager
def own_folder(trainer: Mapping[str, Any]) -> Iterator[None]:
    """Hold the folder in which the run writes checkpoints, if it writes any.

    Raises:
        ConfigError: names the run that holds it, and the keys.
    """
    if (trainer.get("save_freq") or 0) <= 0:
        yield
        return
    folder = Path(str(trainer.get("default_local_dir"))).absolute()
    taken = f"trainer.default_local_dir={folder}: a run writes its checkpoints there"
    fix = (
        ", and two runs would delete each other's and resume from them. Give each run its own folder, or its own "
        "trainer.project_name or trainer.experiment_name, which name verl's default folder"
    )
    with locked(folder, taken, fix, OF_CHECKPOINTS):
        yield


SHM = Path("/dev/shm")
PROC = Path("/proc")
QUIET_SECONDS = 600.0
"""for which a leftover must not have changed: what is being made may not be open yet"""
LOOK_SECONDS = 20.0
CLEAN_SECONDS = 60.0
"""for which the end of a run waits for processes that end"""
_HEX = "[0-9a-f]"
_RANDOM = "[a-z0-9_]{8}"
"""what ``tempfile`` ends a name with"""


Identity = tuple[int, int]
"""device and inode: a path may be made anew by somebody else"""


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
_PLAYERS = re.compile(r"ray::|vllm|verl|turnkey", re.IGNORECASE)
_HOLDERS = re.compile(r"ray|vllm|verl|python", re.IGNORECASE)

KINDS = (
    Kind("shared memory of Python, as vLLM's queues", "shm", re.compile(rf"psm_{_HEX}{{8}}"), stat.S_IFREG),
    Kind("weights on their way to vLLM", "shm", re.compile(rf"verl_weights_{_HEX}{{32}}"), stat.S_IFREG),
    Kind("socket for weights", "", re.compile(r"rl-colocate-zmq-.+\.sock"), stat.S_IFSOCK),
    Kind("socket of vLLM", "", re.compile(rf"{_HEX}{{8}}(-{_HEX}{{4}}){{3}}-{_HEX}{{12}}"), stat.S_IFSOCK),
    Kind("meeting point of vLLM's processes", "", re.compile(rf"vllm_dist_{_HEX}{{32}}"), stat.S_IFREG, _RUNS),
    Kind("lock of a folder of checkpoints", "", re.compile(rf"ckpt_{_HEX}{{8}}\.lock"), stat.S_IFREG, _RUNS),
    Kind("files of an agent's episode", "", re.compile(rf"turnkey-agent-{_RANDOM}"), stat.S_IFDIR, _PLAYERS),
    Kind("socket of the gateway", "", re.compile(rf"turnkey-gw-{_RANDOM}"), stat.S_IFDIR),
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
    identity: Identity


class HiddenError(Exception):
    """The open files of a process of this user are hidden, so what is in use is unknown."""


def find() -> list[Leftover]:
    """The leftovers of this user, largest first; see :data:`QUIET_SECONDS`.

    Processes of other containers and nodes that share these folders are not seen.

    Raises:
        HiddenError: a process that may use leftovers hides its open files.
    """
    there = [(path, kind) for kind in KINDS for path in _of_kind(kind)]
    processes, now, unused = _processes(), time.time(), []
    if hidden := _hidden(processes):
        raise HiddenError(f"the open files of {', '.join(hidden)} cannot be seen from here")
    used = _used_by(processes)
    for path, kind in there:
        with suppress(FileNotFoundError):
            status, (size, changed), inside = path.lstat(), _extent(path), f"{path}/"
            users = [process for process in processes.values() if kind.users and kind.users.search(process.command)]
            if now - changed < QUIET_SECONDS or any(process.began <= changed for process in users):
                continue
            if any(place == str(path) or place.startswith(inside) for place in used):
                continue
            if not (kind.type == stat.S_IFSOCK and _answers(path)):
                unused.append(Leftover(path, kind.what, size, now - changed, (status.st_dev, status.st_ino)))
    return sorted(unused, key=lambda leftover: -leftover.bytes)


def remove(leftovers: Mapping[Path, Identity]) -> list[Path]:
    """Remove what is still the same; returns what could not be removed. Ray's link to a removed session goes, too."""
    left = []
    for path, identity in leftovers.items():
        try:
            if not _same(path, identity):
                continue
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            link = path.parent / "session_latest"
            if path.parent.name == "ray" and link.is_symlink() and not link.exists():
                link.unlink()
        except OSError:
            left.append(path)
    return left


class RunFiles:
    """Context: notes the shared memory that descendants of this process create; :meth:`clean` removes it afterwards.

    Only files that this user creates within the context: an older file is somebody else's, whoever opens it. On a
    cluster that somebody else started, a run has no processes among the descendants, and nothing is noted.
    """

    def __init__(self) -> None:
        self._seen: dict[Path, Identity] = {}
        self._began = 0.0
        self._end, self._enough = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="turnkey-leftovers", daemon=True)

    def __enter__(self) -> RunFiles:
        self._began = time.time() - 1  # clocks of file systems are coarse
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(CLEAN_SECONDS)  # the files of a process that hangs in the kernel cannot be read

    def look(self) -> None:
        """Note the files that are held now."""
        for path in map(Path, _open_in(_descendants(os.getpid()))):
            for kind in KINDS:
                if kind.where == "shm" and path.parent == kind.folder and kind.name.fullmatch(path.name):
                    status = _status(path, kind)
                    if status is not None and status.st_mtime >= self._began:
                        self._seen[path] = status.st_dev, status.st_ino

    def clean(self, seconds: float = CLEAN_SECONDS) -> None:
        """Remove the noted files that no process holds; waits at most ``seconds`` for processes that hold them."""
        thread = threading.Thread(target=self._clean, args=(seconds,), name="turnkey-clean", daemon=True)
        thread.start()
        thread.join(seconds + 5)

    def stop_cleaning(self) -> None:
        """Keep the files that are held now."""
        self._enough.set()

    def _clean(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while there := {path: identity for path, identity in self._seen.items() if _same(path, identity)}:
            held = _used_by(_processes())
            if self._enough.is_set() or time.monotonic() >= end or not any(str(path) in held for path in there):
                remove({path: identity for path, identity in there.items() if str(path) not in held})
                return
            self._enough.wait(0.2)

    def _watch(self) -> None:
        while True:
            last = self._end.wait(LOOK_SECONDS)
            self.look()
            if last:
                return


def _status(path: Path, kind: Kind) -> os.stat_result | None:
    """The status of the path itself, if it is of the kind and belongs to this user."""
    with suppress(OSError):
        status = path.lstat()
        if status.st_uid == os.getuid() and stat.S_IFMT(status.st_mode) == kind.type:
            return status
    return None


def _same(path: Path, identity: Identity) -> bool:
    with suppress(OSError):
        status = path.lstat()
        return (status.st_dev, status.st_ino) == identity
    return False


def _answers(path: Path) -> bool:
    """Whether a process listens at the socket, perhaps in another network; True if that is unknown."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            pass
    return True


def _hidden(processes: Mapping[int, _Process]) -> list[str]:
    """Processes of this user that may use leftovers and hide their open files."""
    hidden = []
    for pid, process in processes.items():
        try:
            os.listdir(PROC / str(pid) / "fd")
        except PermissionError:
            with suppress(OSError):
                if (PROC / str(pid)).stat().st_uid == os.getuid() and _HOLDERS.search(process.command):
                    hidden.append(f"process {pid} ({process.command.partition(chr(0))[0]})")
        except OSError:
            pass
    return hidden


def _of_kind(kind: Kind) -> Iterator[Path]:
    with suppress(OSError):
        for name in os.listdir(kind.folder):
            if kind.name.fullmatch(name) and _status(kind.folder / name, kind) is not None:
                yield kind.folder / name


def _extent(path: Path) -> tuple[int, float]:
    """Bytes that a file or folder takes, and the time of the last change in it."""
    status = path.lstat()
    total, changed = status.st_blocks, status.st_mtime
    for folder, folders, names in os.walk(path):
        for name in (*folders, *names):
            with suppress(OSError):
                status = os.lstat(os.path.join(folder, name))
                total, changed = total + status.st_blocks, max(changed, status.st_mtime)
    return 512 * total, changed


def _used_by(pids: Collection[int]) -> set[str]:
    """Paths that ``pids`` have open, mapped, in their command lines or as their folder, and of all sockets."""
    paths = _open_in(pids) | set(_sockets().values())
    for pid in pids:
        with suppress(OSError):  # it has ended, or is another user's
            for line in (PROC / str(pid) / "maps").read_text(errors="replace").splitlines():
                if len(words := line.split(maxsplit=5)) == 6:
                    paths.add(words[5])
            words = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
            paths.update(word.partition("=")[2] or word for word in words)
            paths.add(os.readlink(PROC / str(pid) / "cwd"))
    return paths


def _open_in(pids: Collection[int]) -> set[str]:
    """Paths of the files that ``pids`` have open, and of the sockets that they listen at."""
    sockets, paths = _sockets(), set()
    for pid in pids:
        with suppress(OSError):
            for descriptor in os.listdir(PROC / str(pid) / "fd"):
                with suppress(OSError):
                    target = os.readlink(PROC / str(pid) / "fd" / descriptor)
                    paths.add(sockets.get(target[8:-1], "") if target.startswith("socket:[") else target)
    return {path for path in paths if path.startswith("/")}


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
    processes = {}
    with suppress(OSError):
        booted = time.time() - float((PROC / "uptime").read_text().split()[0])
        for pid in filter(str.isdecimal, os.listdir(PROC)):
            with suppress(OSError):
                # The name of the command, in parentheses, may hold anything.
                facts = (PROC / pid / "stat").read_text(errors="replace").rpartition(")")[2].split()
                command = (PROC / pid / "cmdline").read_text(errors="replace")
                began = booted + int(facts[19]) / os.sysconf("SC_CLK_TCK")
                processes[int(pid)] = _Process(int(facts[1]), began, command)
    return processes


def _descendants(pid: int) -> set[int]:
    """``pid`` and its descendants."""
    processes, family = _processes(), {pid}
    while more := {child for child, process in processes.items() if process.parent in family} - family:
        family |= more
    return family
