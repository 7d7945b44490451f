"""The guard: a script that starts a command, waits for it, and leaves none of its descendants behind.

It is a child subreaper (prctl(2)): whatever the command starts stays below the guard, also after ``setsid``, ``nohup``
and a double fork with an empty environment. The guard kills all of it when the command ends, or when its own stdin is
closed: its owner ends it, or has ended. Standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time

_SET_CHILD_SUBREAPER = 36  # prctl(2)
_KILL_SECONDS = 10.0  # longer than any process that can be killed needs


def main(command: list[str]) -> int:
    """Run ``command`` with an empty stdin in a session of its own. Its exit status, as a shell gives it."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    actions = [(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)]
    defaults = (signal.SIGPIPE, signal.SIGXFSZ)  # which Python ignores, and its children would too
    try:
        pid = os.posix_spawnp(command[0], command, os.environ, file_actions=actions, setsid=True, setsigdef=defaults)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    threading.Thread(target=_kill_at_end_of_stdin, args=(os.pidfd_open(pid),), daemon=True).start()
    status = _wait_for(pid)
    kill_descendants()
    return status if status >= 0 else 128 - status


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


def kill_descendants() -> None:
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
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            pid = int(name)
            with open(f"/proc/{pid}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(pid)
    below, todo = [], [root]
    while todo:
        next_below = children.get(todo.pop(), [])
        below += next_below
        todo += next_below
    return below


if __name__ == "__main__":
    exit_status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(exit_status)  # the thread waits for the end of stdin
