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

MARK = "TURNKEY_ENV_PROCESS"
_pipes = []  # of the reapers of this process: they stay open until it ends


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


def start(*, seconds: float = 0.0, command: tuple[str, ...] = ()) -> str:
    """Start a reaper, which acts when this process ends. Returns the new mark of the processes that it kills.

    Args:
        seconds: how long it waits before it acts, so that gentler cleaners can finish.
        command: a command that it runs last, with the mark as a further argument.
    """
    import subprocess  # these two here, because the script must start fast
    from uuid import uuid4

    mark, nowhere = uuid4().hex, subprocess.DEVNULL
    words = [sys.executable, "-I", "-S", __file__, mark, str(seconds), *command]
    started = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True)
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


if __name__ == "__main__":
    if os.fork():
        os._exit(0)  # no longer a child of its owner: Ray kills these when the owner ends
    mark, seconds, *command = sys.argv[1:]
    sys.stdin.buffer.read()
    time.sleep(float(seconds))
    sweep(mark)
    if command:
        os.execvp(command[0], [*command, mark])
