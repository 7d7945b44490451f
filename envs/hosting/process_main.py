"""The process of one environment: answers the host's requests until the host closes it or ends.

It imports neither Ray nor torch, so that it starts about as fast as gymnasium imports.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
from typing import Any

from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting.runner import EnvRunner

DUMP_SIGNAL = signal.SIGUSR2
HEADER_BYTES = 8


def frame(message: Any) -> bytes:
    """A message as it goes over the socket: its length, then the pickle."""
    data = pickle.dumps(message)
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def main(fd: int, modules: list[str]) -> None:
    """Serve the socket ``fd``. Requests are (method of ``EnvRunner``, arguments), answers (failure or None, result)."""
    os.set_inheritable(fd, False)
    # Processes that the environment forks must neither answer for this one nor keep its connection open.
    own_pid = os.getpid()
    open_fds = [fd]
    os.register_at_fork(after_in_child=lambda: os.close(open_fds.pop()) if open_fds else None)
    faulthandler.enable()
    faulthandler.register(DUMP_SIGNAL, all_threads=True)  # works in C, so also while an extension module hangs
    runner = EnvRunner(modules)
    _write(fd, (None, None))  # ready
    while True:
        method, args = pickle.loads(_read(fd, int.from_bytes(_read(fd, HEADER_BYTES), "big")))
        failure = result = None
        try:
            result = getattr(runner, method)(*args)
        except EnvironmentFailure as error:
            failure = (error.kind, error.message)
        if os.getpid() != own_pid:
            os._exit(0)  # a fork that the environment let return from its method
        _write(fd, (failure, result))
        if method == "close":
            sys.exit()  # not os._exit: exit handlers clean up


def _read(fd: int, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = os.read(fd, min(size - len(data), 1 << 20))
        if not chunk:
            os._exit(0)  # the host is gone
        data += chunk
    return bytes(data)


def _write(fd: int, message: Any) -> None:
    data = memoryview(frame(message))
    while data:
        data = data[os.write(fd, data) :]
