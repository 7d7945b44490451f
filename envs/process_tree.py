"""Leaves no process behind, of environments, agents and servers: a guard above a command, a reaper beside its owner.

A script, of the standard library only, so that it starts in milliseconds. Its first argument says as what:

- ``guard MEMORY PROCESSES DISK FOLDERS COMMAND``: starts a command, waits for it, and leaves none of its descendants.
  It is a child subreaper (prctl(2)): whatever the command starts stays below the guard, also after ``setsid``,
  ``nohup`` and a double fork with an empty environment. The guard kills all of it when the command ends, when it
  exceeds one of the :class:`Limits`, or when its own stdin is closed: its owner ends it, or has ended.
- ``serve BYTES COMMAND``: the same for a server on standard streams, which may write so many bytes before it gets its
  next message.
- ``reap MARK SECONDS [COMMAND]``: outlives its owner, and kills what the owner's environments or agents have started
  once its stdin is closed, which happens when the owner ends for whatever reason. An owner that is killed cannot clean
  up after itself, nor can guards that are killed with it. Processes are found by a mark in their environment variables,
  which every descendant inherits, even one that left its process group.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import stat
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

MARK = "TURNKEY_ENV_PROCESS"
_SET_CHILD_SUBREAPER = 36  # prctl(2)
_KILL_SECONDS = 10.0  # longer than any process that can be killed needs
CHUNK = 1 << 16
GRACE_SECONDS = 1.0  # less than the client of a server waits
ERRORS_BYTES = 4096
"""kept of a server's standard error: its end"""
OUTPUT_BYTES = 1 << 16
"""kept of what a process of an environment or an agent prints: its end"""
_pipes = []  # to the reapers of this process: they stay open until it ends


def script(*arguments: object) -> list[str]:
    """The command that runs this script with ``arguments``."""
    return [sys.executable, "-I", "-S", __file__, *map(str, arguments)]


class OutputEnd:
    """The end of what a pipe carries; the event loop reads it, so that no process blocks on a full pipe."""

    def __init__(self, pipe: int) -> None:
        import asyncio  # which the script does not need

        self._pipe: int | None = pipe
        self._loop = asyncio.get_running_loop()
        self._kept = bytearray()
        os.set_blocking(pipe, False)
        self._loop.add_reader(pipe, self.collect)

    def collect(self, most_reads: int = 8) -> None:
        """Read what is new; a few times at most, since output may come faster than it is read."""
        while self._pipe is not None and most_reads > 0:
            try:
                chunk = os.read(self._pipe, OUTPUT_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                self.close()
                return
            self._kept += chunk
            del self._kept[:-OUTPUT_BYTES]
            most_reads -= 1

    def clear(self) -> None:
        self.collect()
        self._kept.clear()

    def close(self) -> None:
        """Read no more; what was read stays."""
        if self._pipe is not None:
            self._loop.remove_reader(self._pipe)
            os.close(self._pipe)
            self._pipe = None

    @property
    def text(self) -> str:
        return self._kept.decode(errors="replace")


def sweep(mark: str) -> None:
    """Kill all processes of this user whose variable ``TURNKEY_ENV_PROCESS`` starts with ``mark``; Linux only."""
    wanted = f"{MARK}={mark}".encode()
    for _ in range(100):  # until none is left: one may fork while others are killed
        marked = [pid for pid in _pids() if any(v.startswith(wanted) for v in _variables(pid))]
        if not marked:
            return
        for pid in marked:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def start_reaper(*, seconds: float = 0.0, command: tuple[str, ...] = ()) -> str:
    """Start a reaper, which acts when this process ends. Returns the new mark of the processes that it kills.

    Args:
        seconds: how long it waits before it acts, so that gentler cleaners can finish.
        command: a command that it runs last, with the mark as a further argument.
    """
    import subprocess  # these two here, because the script must start fast
    from uuid import uuid4

    mark, nowhere = uuid4().hex, subprocess.DEVNULL
    started = subprocess.Popen(
        script("reap", mark, seconds, *command),
        stdin=subprocess.PIPE,
        stdout=nowhere,
        stderr=nowhere,
        start_new_session=True,
    )
    started.wait()  # short: the script forks, and its parent exits
    _pipes.append(started.stdin)
    return mark


def _pids() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def _variables(pid: int) -> list[bytes]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:  # gone, or another user's
        return []


def reap(mark: str, seconds: float, command: Sequence[str]) -> None:
    """Wait for the owner's end and ``seconds`` more, kill what has ``mark``, then run ``command`` with it."""
    if os.fork():
        os._exit(0)  # no longer a child of its owner: Ray kills these when the owner ends
    sys.stdin.buffer.read()
    time.sleep(seconds)
    sweep(mark)
    if command:
        os.execvp(command[0], [*command, mark])


class Limits(NamedTuple):
    """What the processes below a guard may use; 0: whatever there is."""

    memory: int = 0
    """bytes that each may allocate, and that all may hold together"""
    processes: int = 0
    disk: int = 0
    """bytes of each file that they write, and by which their folders may grow"""


OVER = "it used more than turnkey.agent."
"""how the last line of standard error begins, where a command was killed because it exceeded a limit"""
_WATCH_SECONDS, _WATCH_SHARE = 0.25, 100  # between two measurements; a watch takes a hundredth of a processor at most
_UNREADABLE = 1 << 60  # bytes; more than any limit, and no less before a command than after it


def guard(limits: Limits, folders: Sequence[str], command: list[str]) -> int:
    """Run ``command`` with an empty stdin in a session of its own. Its exit status, as a shell gives it."""
    _become_subreaper()
    actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    defaults = (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores, and its children would too
    try:
        most = _size(folders) + limits.disk if limits.disk and folders else 0
        _restrict(limits)
        pid = os.posix_spawnp(command[0], command, os.environ, file_actions=actions, setsid=True, setsigdef=defaults)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    handle, exceeded = os.pidfd_open(pid), list[str]()
    threading.Thread(target=_kill_at_end_of_stdin, args=(handle,), daemon=True).start()
    watches: list[Callable[[], str]] = []
    if limits.memory or limits.processes:
        watches.append(lambda: _over(limits))
    if most:
        watches.append(lambda: f"disk_gb={limits.disk / 2**30:g}" if _size(folders) > most else "")
    for watch in watches:
        threading.Thread(target=_watch, args=(watch, handle, exceeded), daemon=True).start()
    status = _wait_for(pid)
    _kill_descendants()
    if exceeded:
        print(f"\n{OVER}{exceeded[0]}", file=sys.stderr)
        return 128 + signal.SIGKILL
    return status if status >= 0 else 128 - status


def _restrict(limits: Limits) -> None:
    """What the kernel enforces, process by process; this one, which is small, is restricted too."""
    import resource  # which the reaper does not need

    for what, most in ((resource.RLIMIT_DATA, limits.memory), (resource.RLIMIT_FSIZE, limits.disk)):
        hard = resource.getrlimit(what)[1]
        if most and (hard == resource.RLIM_INFINITY or most < hard):
            resource.setrlimit(what, (most, most))


def _watch(measure: Callable[[], str], handle: int, exceeded: list[str]) -> None:
    """Kill the command as soon as ``measure`` names a limit that it exceeds."""
    while True:
        began = time.thread_time()
        if limit := measure():
            exceeded.append(limit)
            with contextlib.suppress(OSError):  # it has ended by itself
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            return
        time.sleep(max(_WATCH_SECONDS, _WATCH_SHARE * (time.thread_time() - began)))


def _over(limits: Limits) -> str:
    """The limit that the processes below this one exceed together; empty: none."""
    below = _descendants(os.getpid())
    if limits.processes and len(below) > limits.processes:
        return f"processes={limits.processes}"
    if limits.memory and sum(map(_resident, below)) > limits.memory and sum(map(_held, below)) > limits.memory:
        return f"memory_gb={limits.memory / 2**30:g}"
    return ""


def _resident(pid: int) -> int:
    """Bytes of memory of a process, with files and with what it shares."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


def _held(pid: int) -> int:
    """The same without files, and of what it shares only its part, which takes longer to find out."""
    with contextlib.suppress(OSError, KeyError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        fields = dict(line.split()[:2] for line in file.readlines()[1:])
        return 1024 * (int(fields[b"Pss_Anon:"]) + int(fields[b"Pss_Shmem:"]))
    return _resident(pid)


def _size(folders: Sequence[str]) -> int:
    """Bytes of the files in ``folders``; a file of several names counts once, a folder that cannot be read a lot."""
    size, todo, counted = 0, [*map(os.path.realpath, folders)], set()
    while todo:
        path = todo.pop()
        try:
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                todo += [f"{path}/{name}" for name in os.listdir(path)]
            elif (file := (status.st_dev, status.st_ino)) not in counted:
                size += status.st_blocks * 512
                counted |= {file} if status.st_nlink > 1 else set()
        except OSError as error:  # else it has been removed
            if isinstance(error, PermissionError) or error.errno == errno.ENAMETOOLONG:
                size += _UNREADABLE
    return size


def _become_subreaper() -> None:
    import ctypes  # which the reaper does not need

    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_at_end_of_stdin(handle: int) -> None:
    while os.read(0, 1):
        pass
    with contextlib.suppress(OSError):  # it has ended by itself
        signal.pidfd_send_signal(handle, signal.SIGKILL)


def _wait_for(pid: int) -> int:
    while True:
        ended, status = os.wait()  # others are descendants whose parent has ended
        if ended == pid:
            return os.waitstatus_to_exitcode(status)


def _kill_descendants() -> None:
    deadline = time.monotonic() + _KILL_SECONDS
    while time.monotonic() < deadline:  # repeatedly: one may fork while others are killed
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in _descendants(os.getpid()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid in _pids():
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/stat", "rb") as file:
            children.setdefault(int(file.read().rpartition(b")")[2].split()[1]), []).append(pid)
    below, todo = [], [root]
    while todo:
        next_below = children.get(todo.pop(), [])
        below += next_below
        todo += next_below
    return below


def serve(most_bytes: int, command: list[str]) -> int:
    """Run a server between it and its client, which bounds its output. Its exit status, as a shell gives it."""
    import subprocess  # which an agent's guard does not wait for

    errors = bytearray()

    def leave_nothing() -> None:
        _kill_descendants()
        with contextlib.suppress(OSError):
            os.write(2, bytes(errors[-ERRORS_BYTES:]))

    def terminated(*_: object) -> None:  # raises nothing: it may come while the children are being ended, and again
        leave_nothing()
        os._exit(128 + signal.SIGTERM)

    _become_subreaper()
    signal.signal(signal.SIGTERM, terminated)
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    try:
        _pass_on(process, most_bytes, errors)
    finally:
        process.poll()
        leave_nothing()
    status = process.returncode
    return 137 if status is None else status if status >= 0 else 128 - status


def _pass_on(process: subprocess.Popen[bytes], most_bytes: int, errors: bytearray) -> None:
    """Pass messages both ways until the server ends, or a second after the client wants the end."""
    import select

    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    to_server, from_server, of_errors = process.stdin.fileno(), process.stdout.fileno(), process.stderr.fileno()
    os.set_blocking(to_server, False)
    ended = os.pidfd_open(process.pid)
    waiting, written, deadline = bytearray(), 0, float("inf")
    poll = select.poll()
    for descriptor in (from_server, of_errors, ended):
        poll.register(descriptor, select.POLLIN)
    poll.register(0, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        ready = dict(poll.poll(None if deadline == float("inf") else left * 1000))
        if 0 in ready:
            # A server that does not read keeps its client waiting, but the client can still close its side.
            chunk = b"" if not ready[0] & select.POLLIN else os.read(0, CHUNK)
            waiting += chunk
            written = 0
            if not chunk:
                poll.unregister(0)
                deadline = time.monotonic() + GRACE_SECONDS
            elif len(waiting) > most_bytes:
                poll.modify(0, 0)
            if waiting:
                poll.register(to_server, select.POLLOUT)
        if to_server in ready:
            try:
                del waiting[: os.write(to_server, waiting[:CHUNK])]
            except BlockingIOError:
                pass
            except OSError:  # it no longer reads
                waiting.clear()
            if not waiting:
                poll.unregister(to_server)
                if deadline == float("inf"):
                    poll.modify(0, select.POLLIN)
        if not waiting and deadline < float("inf") and not process.stdin.closed:
            process.stdin.close()  # a server ends by itself then
        if from_server in ready:
            chunk = os.read(from_server, CHUNK)
            written += len(chunk)
            if not chunk:
                poll.unregister(from_server)
            elif written > most_bytes:
                errors += f"\nit wrote more than {most_bytes} bytes without a message from its client\n".encode()
                return
            elif not _write(chunk):
                return
        if of_errors in ready:
            chunk = os.read(of_errors, CHUNK)
            errors += chunk
            del errors[:-ERRORS_BYTES]
            if not chunk:
                poll.unregister(of_errors)
        if ended in ready and not {from_server, of_errors} & ready.keys():
            process.wait()
            return


def _write(data: bytes) -> bool:
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:  # the client is gone
        return False
    return True


if __name__ == "__main__":
    task, *words = sys.argv[1:]
    if task == "reap":
        reap(words[0], float(words[1]), words[2:])
        exit_status = 0
    else:
        if task == "guard":
            exit_status = guard(Limits(*map(int, words[:3])), words[3].splitlines(), words[4:])
        else:
            exit_status = serve(int(words[0]), words[1:])
    sys.stderr.flush()
    os._exit(exit_status)  # a thread waits for the end of stdin
