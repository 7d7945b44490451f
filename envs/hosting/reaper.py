"""Outlives a host, to kill what the host's environments have started: run as a script, it waits for its stdin to end.

Environments start servers, browsers, planners; a host that is killed cannot clean up after them. They are found by a
mark in their environment variables, which every descendant inherits, also one that left its process group. Standard
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
    for _ in range(100):  # until none is left: one may have been forked while the others were killed
        found = [pid for pid in _pids() if any(v.startswith(wanted) for v in _variables(pid))]
        if not found:
            return
        for pid in found:
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
        os._exit(0)  # no child of the host any more: whoever kills a host's children does not find us
    sys.stdin.buffer.read()
    sweep(sys.argv[1])
