"""The reaper: a script that outlives a host and kills the processes which the host's environments have started.

It waits until its stdin is closed, which happens when the host ends for whatever reason.

Environments start servers, browsers and planners; a host that is killed cannot clean them up. They are found by a mark
in their environment variables, which every descendant inherits, even one that left its process group. Standard
library only, and nothing of this package: the script starts in milliseconds and stays small.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

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
        os._exit(0)  # no longer a child of the host, so not killed with its children
    sys.stdin.buffer.read()
    sweep(sys.argv[1])
