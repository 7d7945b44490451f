"""Runs an agent that is a function, ``module:function``, called as ``function(task, agent)``.

In a process of its own, a busy loop or a crash costs one episode. A process whose episode has ended cleanly serves the
next one, since importing an agent's libraries takes a second or more. A module that keeps a client for later episodes,
or leaves threads or processes running, gets a new process for each episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from verl_turnkey.envs.agents.base import PLAYED, STRAYS, AgentFailure, AgentHandle, Outcome, cut, without_secret
from verl_turnkey.envs.agents.calls import KEY, call, name_of
from verl_turnkey.envs.agents.processes import AgentProcess
from verl_turnkey.envs.agents.results import turn_name
from verl_turnkey.envs.daemon_threads import DaemonThreads
from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.envs.variables import inherited, without_proxy

BOOT_SECONDS = 120.0  # to start an interpreter and import the agent's libraries on a busy machine
_LARGEST_ANSWER = 1 << 26
_KEPT = "calls through a client of an earlier episode: make the client in the function, with agent.client()"

logger = logging.getLogger(__name__)
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
        inherit: variables of this process that it inherits besides harmless ones.
        calls: the number of calls that have come for an episode's key, after its end included; None: unknown.
    """

    def __init__(
        self,
        path: str,
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        inherit: Collection[str] = (),
        calls: Callable[[str], int] | None = None,
    ) -> None:
        self._path, self._timeout, self._env, self._calls = path, timeout, dict(env or {}), calls
        self._inherit = inherit
        self._idle: list[_FunctionProcess] = []
        self.leaves: str | None = None
        """what its module leaves behind, so that a process plays one episode; None: nothing that was noticed"""

    async def run(self, task: Mapping[str, Any], agent: AgentHandle) -> Outcome:
        """As ``Runner.run``."""
        process = self._idle.pop() if self._idle else None
        if process is None or self._calls is None:
            return await self._play(process, task, agent)
        calls, keys = self._calls, [*process.keys]
        before = sum(map(calls, keys))
        try:
            outcome, failure = await self._play(process, task, agent), None
        except AgentFailure as error:
            outcome, failure = Outcome(), error
        strays, own = sum(map(calls, keys)) > before, calls(agent.key)
        if not own and not outcome.truncated:  # a new process shows whether the last one was in the way
            outcome, failure = await self._play(None, task, agent), None
            strays |= calls(agent.key) > 0
        if strays:
            self._leave(_KEPT)
            await self.close()
            if own:
                raise AgentFailure(f"{KEY}={self._path} {_KEPT}")
        if failure is not None:
            raise failure
        return outcome

    def _leave(self, what: str) -> None:
        if self.leaves is None:
            self.leaves = what
            logger.warning("%s=%s %s. Each of its episodes gets a new process", KEY, self._path, what)

    async def _play(self, process: _FunctionProcess | None, task: Mapping[str, Any], agent: AgentHandle) -> Outcome:
        """One episode in ``process``; None: in a new one."""
        fields = asdict(agent) | {"workspace": None if agent.workspace is None else str(agent.workspace)}
        try:
            request = json.dumps({"task": dict(task), "agent": fields})
        except (TypeError, ValueError) as error:
            raise AgentFailure(f"the task must hold plain JSON values: {error}") from None
        if process is None:
            process = await _FunctionProcess.start(self._path, self._variables(agent))
        process.keys.append(agent.key)
        reusable = False
        try:
            answer = await asyncio.wait_for(process.ask(request), self._timeout)
            if answer.get("leaves"):
                self._leave(answer["leaves"])
            reusable = self.leaves is None
        except (asyncio.TimeoutError, TimeoutError):
            return Outcome(truncated=True, reason=f"the agent ran longer than turnkey.agent.timeout={self._timeout:g}")
        except (asyncio.IncompleteReadError, ConnectionError):
            return Outcome(reason=await process.how_it_ended(agent.key))
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

    def _variables(self, agent: AgentHandle) -> dict[str, str]:
        proxies = without_proxy(urlsplit(agent.base_url).hostname or "")
        return {"OMP_NUM_THREADS": "1"} | inherited(self._inherit) | proxies | {"CUDA_VISIBLE_DEVICES": ""} | self._env

    async def close(self) -> None:
        """End the processes that wait for an episode."""
        while self._idle:
            await self._idle.pop().end()


class _FunctionProcess:
    """A process that runs ``function_main.main``."""

    def __init__(self, process: AgentProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self.keys: list[str] = []
        """of the episodes that it has played"""

    @classmethod
    async def start(cls, path: str, variables: Mapping[str, str]) -> _FunctionProcess:
        """Start it and wait until the function is loaded. Raises AgentFailure."""
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

    async def how_it_ended(self, secret: str = "") -> str:
        """Its exit status and what it printed last, without ``secret``."""
        status = await self._process.wait(5.0)
        how = "closed its connection" if status is None else f"ended with exit status {status}"
        if status == 137:
            how += " (SIGKILL, as the kernel sends when memory runs out)"
        line = without_secret(self._process.last_line(), secret)
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
        os.environ.update(without_proxy())
        self._function, self._timeout = load_function(path, KEY), timeout
        self._threads = DaemonThreads(most_threads, "agent")

    async def run(self, task: Mapping[str, Any], agent: AgentHandle) -> Outcome:
        """As ``Runner.run``."""
        played = PLAYED.set(agent.key)
        try:
            outcome = await asyncio.wait_for(call(self._function, task, agent, self._threads), self._timeout)
        except (asyncio.TimeoutError, TimeoutError):
            return Outcome(truncated=True, reason=f"the agent ran longer than turnkey.agent.timeout={self._timeout:g}")
        finally:
            PLAYED.reset(played)
        if agent.key in STRAYS:
            STRAYS.discard(agent.key)
            raise AgentFailure(f"{KEY}={name_of(self._function)} {_KEPT}")
        return outcome

    async def close(self) -> None:
        """Nothing to end."""
