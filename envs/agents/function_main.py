"""The process of a function runner: calls the user's function for one episode after another.

Requests and answers are lines of JSON on a socket; the process ends when the socket is closed. What the function
returns is read here, so that none of its objects leaves the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle
from verl_turnkey.envs.agents.calls import KEY, call
from verl_turnkey.envs.errors import ModuleImportError
from verl_turnkey.envs.user_modules import load_function

_ENDING_SECONDS = 0.1  # for threads that are about to end


def main(fd: int, path: str) -> None:
    """Serve the socket ``fd`` with the function ``path``."""
    os.set_inheritable(fd, False)
    # Processes that the function forks must neither answer for this one nor keep its connection open.
    open_fds = [fd]
    os.register_at_fork(after_in_child=lambda: os.close(open_fds.pop()) if open_fds else None)
    with socket.socket(fileno=fd) as connection, connection.makefile("r", encoding="utf-8") as requests:
        try:
            function = load_function(path, KEY)
        except ModuleImportError as error:
            connection.sendall(_line({"failure": str(error)}))
            return
        loaded = {*threading.enumerate()}
        connection.sendall(_line({}))  # ready
        for line in requests:
            fields = json.loads(line)
            workspace = fields["agent"].pop("workspace")
            agent = AgentHandle(**fields["agent"], workspace=None if workspace is None else Path(workspace))
            answer: dict[str, Any]
            try:
                answer = {"outcome": asdict(asyncio.run(call(function, fields["task"], agent)))}
            except AgentFailure as failure:
                answer = {"failure": failure.reason}
            connection.sendall(_line(answer | {"leaves": _left(loaded)}))


def _line(answer: dict[str, Any]) -> bytes:
    return (json.dumps(answer) + "\n").encode()


def _left(loaded: Collection[threading.Thread]) -> str | None:
    """What the function leaves running besides the threads ``loaded`` with its module, in words; None: nothing."""
    for thread in set(threading.enumerate()).difference(loaded):
        thread.join(_ENDING_SECONDS)
        if thread.is_alive():
            return f"leaves the thread {thread.name!r} running"
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return "leaves a process running"
