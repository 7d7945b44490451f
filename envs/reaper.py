"""The reaper: a script that outlives its owner and kills what the owner's environments or agents have started.

It waits until its stdin is closed, which happens when the owner ends for whatever reason.

Environments start servers, browsers and planners, agents whatever they like; an owner that is killed cannot clean them
up. They are found by a mark in their environment variables, which every descendant inherits, even one that left its
process group. Standard library only, and nothing of this package: the script starts in milliseconds and stays small.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import IO

MARK = "TURNKEY_ENV_PROCESS"


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


def start(mark: str, *, seconds: float = 0.0, command: tuple[str, ...] = ()) -> IO[bytes]:
    """Start the reaper of this process, for the processes of ``mark``. Returns the pipe whose end makes it act.

    ``seconds``: how long it waits then, for others that clean up. ``command``: what it runs last.
    """
    import subprocess  # not in the script, which must start fast

    words = [sys.executable, "-I", "-S", __file__, mark, str(seconds), *command]
    nowhere = subprocess.DEVNULL
    started = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True)
    started.wait()  # short: the script forks, and its parent exits
    assert started.stdin is not None
    return started.stdin


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


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # no longer a child of its owner: Ray kills these when the owner ends
    sys.stdin.buffer.read()
    time.sleep(float(sys.argv[2]))
    sweep(sys.argv[1])
    if sys.argv[3:]:
        os.execvp(sys.argv[3], sys.argv[3:])
