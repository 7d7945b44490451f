"""Processes that are started afresh: an interpreter each, for an environment or for the template of a host."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from verl_turnkey.envs import reaper

BOOT_SECONDS = 120.0  # to start an interpreter and import gymnasium on a busy machine
EXIT_SECONDS = 1.0
_BOOT = """
import json, sys
fd, modules, sys.path[:] = json.loads(sys.argv[1])
sys.argv = ["turnkey-environment"]
from verl_turnkey.envs.hosting.{0} import main
main(fd, modules)
"""
_numbers = itertools.count()


_owner = functools.cache(reaper.start)
"""the mark of what the reaper of this process kills; the first call starts the reaper"""


class Fresh:
    """A process that this one has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid, self._process = process.pid, process

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the id is still this group's

    def reap(self) -> None:
        self._process.wait()

    async def status(self) -> int | None:
        """As of a :class:`Copy`; does not reap it."""
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        for _ in range(round(EXIT_SECONDS / 0.02)):
            with contextlib.suppress(ChildProcessError):
                if (exited := os.waitid(os.P_PID, self.pid, flags)) is not None:
                    return exited.si_status if exited.si_code == os.CLD_EXITED else -exited.si_status
            await asyncio.sleep(0.02)
        return None


def start(main: str, mark: str, connection: socket.socket, modules: Sequence[str], output: int) -> Fresh:
    """Start ``main`` of a module of this folder in an interpreter of its own. Raises OSError."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables |= {reaper.MARK: mark, "CUDA_VISIBLE_DEVICES": ""}
    variables.setdefault("OMP_NUM_THREADS", "1")
    paths = [str(path) for path in sys.path]  # some programs put Path objects there
    argument = json.dumps([connection.fileno(), list(modules), paths])
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", _BOOT.format(main), argument],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=variables,
        pass_fds=(connection.fileno(),),
        start_new_session=True,
    )
    return Fresh(process)


def new_mark() -> str:
    """By which the reaper finds a process and all that it starts."""
    return f"{_owner()}.{next(_numbers):09d}."  # all of one length
