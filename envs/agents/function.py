"""Runs an agent that is a function, ``module:function``, called as ``function(task, agent)``.

In a process of its own, a busy loop or a crash costs one episode. A process whose episode has ended cleanly serves the
next one, since importing an agent's libraries takes a second or more.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle, Outcome, cut
from verl_turnkey.envs.agents.calls import KEY, call
from verl_turnkey.envs.agents.processes import AgentProcess, scrubbed, without_proxy
from verl_turnkey.envs.agents.results import turn_name
from verl_turnkey.envs.daemon_threads import DaemonThreads
from verl_turnkey.envs.user_modules import load_function

BOOT_SECONDS = 120.0  # to start an interpreter and import the agent's libraries on a busy machine
_LARGEST_ANSWER = 1 << 26
_BOOT = """
import json, sys
fd, path, sys.path[:] = json.loads(sys.argv[1])
sys.argv = ["turnkey-agent"]
from verl_turnkey.envs.agents.function_main import main
main(fd, path)
"""


class FunctionRunner:
    """Calls a function for each episode; a process runs one episode at a time.

    Args:
        path: ``module:function`` or ``path/to/file.py:function``.
        timeout: seconds that an episode may take; then its process is killed.
        env: further environment variables of the process.
    """

    def __init__(self, path: str, *, timeout: float, env: Mapping[str, str] | None = None) -> None:
        self._path, self._timeout, self._env = path, timeout, dict(env or {})
        self._idle: list[_FunctionProcess] = []

    async def run(self, task: Mapping[str, Any], agent: AgentHandle) -> Outcome:
        """As ``Runner.run``."""
        fields = asdict(agent) | {"workspace": None if agent.workspace is None else str(agent.workspace)}
        try:
            request = json.dumps({"task": dict(task), "agent": fields})
        except (TypeError, ValueError) as error:
            raise AgentFailure(f"the task must hold plain JSON values: {error}") from None
        process = self._idle.pop() if self._idle else await _FunctionProcess.start(self._path, self._env)
        reusable = False
        try:
            answer = await asyncio.wait_for(process.ask(request), self._timeout)
            reusable = answer.get("clean", False)
        except (asyncio.TimeoutError, TimeoutError):
            return Outcome(truncated=True, reason=f"the agent ran longer than turnkey.agent.timeout={self._timeout:g}")
        except (asyncio.IncompleteReadError, ConnectionError):
            return Outcome(reason=await process.how_it_ended())
        finally:
            if reusable:
                self._idle.append(process)
            else:
                await process.end()
        if "failure" in answer:
            raise AgentFailure(answer["failure"])
        fields = answer["outcome"]
        turns = {turn_name(turn): reward for turn, reward in fields.pop("turn_rewards").items()}  # JSON made texts
        return Outcome(**fields, turn_rewards=turns)

    async def close(self) -> None:
        """End the processes that wait for an episode."""
        while self._idle:
            await self._idle.pop().end()


class _FunctionProcess:
    """A process that runs ``function_main.main``."""

    def __init__(self, process: AgentProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def start(cls, path: str, env: Mapping[str, str]) -> _FunctionProcess:
        """Start it and wait until the function is loaded. Raises AgentFailure."""
        variables = scrubbed(os.environ) | without_proxy() | {"CUDA_VISIBLE_DEVICES": ""} | dict(env)
        variables.setdefault("OMP_NUM_THREADS", "1")
        own_end, child_end = socket.socketpair()
        own_end.setblocking(False)
        with child_end:
            reader, writer = await asyncio.open_unix_connection(sock=own_end, limit=_LARGEST_ANSWER)
            argument = json.dumps([child_end.fileno(), path, [str(place) for place in sys.path]])
            command = [sys.executable, "-u", "-c", _BOOT, argument]
            started = cls(AgentProcess.start(command, env=variables, pass_fds=[child_end.fileno()]), reader, writer)
        try:
            answer = await asyncio.wait_for(started._answer(), BOOT_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            await started.end()
            raise AgentFailure(f"{KEY}={path} took longer than {BOOT_SECONDS:g} s to import") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            reason = await started.how_it_ended()
            await started.end()
            raise AgentFailure(f"{KEY}={path} could not be imported: {reason}") from None
        except BaseException:
            await started.end()
            raise
        if "failure" in answer:
            await started.end()
            raise AgentFailure(answer["failure"])
        return started

    async def ask(self, request: str) -> dict[str, Any]:
        """Call the function. Raises IncompleteReadError or ConnectionError: the process has ended."""
        self._writer.write(request.encode() + b"\n")
        await self._writer.drain()
        return await self._answer()

    async def _answer(self) -> dict[str, Any]:
        try:
            return json.loads(await self._reader.readuntil(b"\n"))
        except (ValueError, asyncio.LimitOverrunError):  # something else wrote to the connection
            raise ConnectionError from None

    async def how_it_ended(self) -> str:
        """Its exit status and what it printed last."""
        status = await self._process.wait(5.0)
        how = "closed its connection" if status is None else f"ended with exit status {status}"
        if status == 137:
            how += " (SIGKILL, as the kernel sends when memory runs out)"
        line = self._process.last_line()
        return cut(f"the agent's process {how}{f': {line}' if line else ''}")

    async def end(self) -> None:
        """Kill it and all that it has started."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._process.end()


class InProcessFunctionRunner:
    """Calls a function in this process, an ``async`` one on the event loop: a busy loop in it blocks all episodes.

    A function that is not ``async`` runs in a thread, which nothing can stop: after ``timeout`` its result is dropped.

    Raises:
        ModuleImportError: there is no such function.
    """

    def __init__(self, path: str, *, timeout: float, most_threads: int = 256) -> None:
        self._function, self._timeout = load_function(path, KEY), timeout
        self._threads = DaemonThreads(most_threads, "agent")

    async def run(self, task: Mapping[str, Any], agent: AgentHandle) -> Outcome:
        """As ``Runner.run``."""
        try:
            return await asyncio.wait_for(call(self._function, task, agent, self._threads), self._timeout)
        except (asyncio.TimeoutError, TimeoutError):
            return Outcome(truncated=True, reason=f"the agent ran longer than turnkey.agent.timeout={self._timeout:g}")

    async def close(self) -> None:
        """Nothing to end."""
