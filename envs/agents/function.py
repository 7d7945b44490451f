"""Runs an agent that is a function, ``module:function``, called as ``function(task, agent)``, or a service at a URL.

In a process of its own, a busy loop or a crash costs one episode. A process whose episode has ended cleanly serves the
next one, since importing an agent's libraries takes a second or more. A module that keeps a client for later episodes,
or leaves threads or processes running, gets a new process for each episode, and so does one in a sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import importlib.util
import inspect
import json
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from verl_turnkey.envs.agents.base import (
    PLAYED,
    REASON_CHARS,
    STRAYS,
    AgentFailure,
    AgentHandle,
    AgentResult,
    Runner,
    SyncAgentHandle,
    cut,
    ran_too_long,
    read_result,
    turn_name,
    without_secret,
)
from verl_turnkey.envs.agents.folders import episode_folder
from verl_turnkey.envs.agents.processes import NO_LIMITS, AgentProcess
from verl_turnkey.envs.agents.sandboxes import APP, Bubblewrap, Job, Launch
from verl_turnkey.envs.daemon_threads import DaemonThreads
from verl_turnkey.envs.errors import ModuleImportError
from verl_turnkey.envs.http import ServerError, check_url, post_json
from verl_turnkey.envs.process_tree import OVER, Limits
from verl_turnkey.envs.user_modules import load_function
from verl_turnkey.envs.variables import inherited, without_proxy

logger = logging.getLogger(__name__)
KEY = "turnkey.agent.run"
"""the configuration key that names the function, for errors"""
ARGUMENTS = ("task", "agent")


async def call(
    function: Callable[..., Any],
    path: str,
    task: Mapping[str, Any],
    agent: AgentHandle,
    threads: Executor | None = None,
) -> AgentResult:
    """Call ``function(task, agent)``. One that is not ``async`` runs in ``threads``; None: here, and it blocks.

    ``path``: how the user names it.

    Raises:
        AgentFailure: what it returned cannot be read.
    """
    handle = SyncAgentHandle(**vars(agent))
    try:
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            value = await function(task, agent)
        elif threads is None:
            value = function(task, handle)
        else:
            context = contextvars.copy_context()
            value = await asyncio.get_running_loop().run_in_executor(
                threads, lambda: context.run(_without_exit, function, task, handle)
            )
    except (Exception, SystemExit) as error:
        logger.debug("the agent's function raised", exc_info=True)
        source = inspect.getsourcefile(inspect.unwrap(function)) or ""
        return AgentResult(reason=_reason(error, source, agent.key))
    return read_result(value, f"{KEY}={path}")


def _without_exit(function: Callable[..., Any], task: Mapping[str, Any], agent: SyncAgentHandle) -> Any:
    try:
        return function(task, agent)
    except SystemExit as error:  # a future would hand it to the event loop, which would stop
        raise RuntimeError(f"SystemExit: {error.code}") from error


def _reason(error: BaseException, source: str, secret: str) -> str:
    """Class and message of an exception without ``secret``, cut if long, and the line of ``source`` where it arose."""
    what = without_secret(traceback.format_exception_only(type(error), error)[-1].strip(), secret)
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if frame.filename == source), frames[-1])
    place = f" ({frame.filename.rpartition('/')[2]}:{frame.lineno})"
    return what[: REASON_CHARS - len(place)] + place


# --- the process that calls the function ------------------------------------------------------------------------------
# Requests and answers are lines of JSON on a socket; it ends when the socket is closed. What the function returns is
# read in it, so that none of its objects leaves the process.

_ENDING_SECONDS = 0.1  # for threads that are about to end


def main(fd: int, path: str) -> None:
    """Serve the socket ``fd`` with the function ``path``."""
    os.set_inheritable(fd, False)
    # Processes that the function forks must neither answer for this one nor keep its connection open.
    open_fds = [fd]
    os.register_at_fork(after_in_child=lambda: os.close(open_fds.pop()) if open_fds else None)
    with socket.socket(fileno=fd) as connection, connection.makefile("r", encoding="utf-8") as requests:
        try:
            function = load_function(path, KEY, *ARGUMENTS)
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
                answer = {"outcome": asdict(asyncio.run(call(function, path, fields["task"], agent)))}
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


# --- runners of functions ---------------------------------------------------------------------------------------------

BOOT_SECONDS = 120.0  # to start an interpreter and import the agent's libraries on a busy machine
_LARGEST_ANSWER = 1 << 26
_KEPT = "calls through a client of an earlier episode: make the client in the function, with agent.client()"

_BOOT = """
import json, sys
fd, path, sys.path[:] = json.loads(sys.argv[1])
sys.argv = ["turnkey-agent"]
from verl_turnkey.envs.agents.function import main
main(fd, path)
"""


class FunctionRunner(Runner):
    """Calls a function for each episode; a process runs one episode at a time.

    Args:
        path: ``module:function`` or ``path/to/file.py:function``.
        timeout: seconds that an episode may take; then its process is killed.
        env: further environment variables of the process.
        inherit: variables of this process that it inherits besides harmless ones; none of them reaches a sandbox.
        sandbox: what a process can see and reach; None: what this one can.
        limits: what the processes of an episode may use.
        fresh: each episode gets a new process.
        calls: the number of calls that have come for an episode's key, after its end included; None: unknown.
    """

    def __init__(
        self,
        path: str,
        *,
        timeout: float,
        env: Mapping[str, str] | None = None,
        inherit: Collection[str] = (),
        sandbox: Bubblewrap | None = None,
        limits: Limits = NO_LIMITS,
        fresh: bool = False,
        calls: Callable[[str], int] | None = None,
    ) -> None:
        self._path, self._timeout = absolute(path) if sandbox else path, timeout
        self._env, self._calls = dict(env or {}), calls
        self._inherit, self._limits, self._fresh = inherit, limits, fresh or sandbox is not None
        self.sandbox = sandbox
        self._idle: list[_FunctionProcess] = []
        self.leaves: str | None = None
        """what its module leaves behind, so that a process plays one episode; None: nothing that was noticed"""

    async def run(self, task: Mapping[str, Any], agent: AgentHandle) -> AgentResult:
        """As ``Runner.run``."""
        process = self._idle.pop() if self._idle else None
        if process is None or self._calls is None:
            return await self._play(process, task, agent)
        calls, keys = self._calls, [*process.keys]
        before = sum(map(calls, keys))
        try:
            outcome, failure = await self._play(process, task, agent), None
        except AgentFailure as error:
            outcome, failure = AgentResult(), error
        strays, requests = sum(map(calls, keys)) > before, calls(agent.key)
        if not requests and not outcome.truncated:  # a new process shows whether the last one was in the way
            outcome, failure = await self._play(None, task, agent), None
            strays |= calls(agent.key) > 0
        if strays:
            self._leave(_KEPT)
            await self.close()
            if requests:
                raise AgentFailure(f"{KEY}={self._path} {_KEPT}")
        if failure is not None:
            raise failure
        return outcome

    def _leave(self, what: str) -> None:
        if self.leaves is None:
            self.leaves = what
            logger.warning("%s=%s %s. Each of its episodes gets a new process", KEY, self._path, what)

    async def _play(self, process: _FunctionProcess | None, task: Mapping[str, Any], agent: AgentHandle) -> AgentResult:
        """One episode in ``process``; None: in a new one."""
        if self.sandbox is None:
            return await self._ask(process, task, agent, Job([], Path(), Path(), self._variables(agent)))
        async with episode_folder() as folder:
            workspace = agent.workspace or folder / "app"
            env = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | self._env
            job = Job([], folder, workspace, env, socket=agent.socket)
            return await self._ask(None, task, self.sandbox.inside(replace(agent, workspace=workspace), APP), job)

    async def _ask(
        self, process: _FunctionProcess | None, task: Mapping[str, Any], agent: AgentHandle, job: Job
    ) -> AgentResult:
        """``job``: what a new process needs, without its command."""
        fields = asdict(agent) | {"workspace": None if agent.workspace is None else str(agent.workspace)}
        try:
            request = json.dumps({"task": dict(task), "agent": fields})
        except (TypeError, ValueError) as error:
            raise AgentFailure(f"the task must hold plain JSON values: {error}") from None
        if process is None:
            process = await _FunctionProcess.start(self._path, replace(job, limits=self._limits), self.sandbox)
        process.keys.append(agent.key)
        reusable = False
        try:
            answer = await asyncio.wait_for(process.ask(request), self._timeout)
            if answer.get("leaves"):
                self._leave(answer["leaves"])
            reusable = self.leaves is None and not self._fresh
        except (asyncio.TimeoutError, TimeoutError):
            return AgentResult(truncated=True, reason=ran_too_long(self._timeout))
        except (asyncio.IncompleteReadError, ConnectionError):
            return AgentResult(reason=await process.how_it_ended(agent.key))
        finally:
            if reusable:
                self._idle.append(process)
            else:
                await process.end()
        if "failure" in answer:
            raise AgentFailure(answer["failure"])
        fields = answer["outcome"]
        turns = {turn_name(turn): reward for turn, reward in fields.pop("turn_rewards").items()}  # JSON made texts
        return AgentResult(**fields, turn_rewards=turns)

    def _variables(self, agent: AgentHandle) -> dict[str, str]:
        proxies = without_proxy(urlsplit(agent.base_url).hostname or "")
        return {"OMP_NUM_THREADS": "1"} | inherited(self._inherit) | proxies | {"CUDA_VISIBLE_DEVICES": ""} | self._env

    async def close(self) -> None:
        """End the processes that wait for an episode."""
        while self._idle:
            await self._idle.pop().end()


class _FunctionProcess:
    """A process that runs :func:`main`."""

    def __init__(self, process: AgentProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self.keys: list[str] = []
        """of the episodes that it has played"""

    @classmethod
    async def start(cls, path: str, job: Job, sandbox: Bubblewrap | None) -> _FunctionProcess:
        """Start it and wait until the function is loaded. Raises AgentFailure."""
        our_end, child_end = socket.socketpair()
        our_end.setblocking(False)
        with child_end:
            reader, writer = await asyncio.open_unix_connection(sock=our_end, limit=_LARGEST_ANSWER)
            # Not those that are names of import hooks, as of editable packages.
            places = [os.path.abspath(place) if os.path.exists(place or ".") else place for place in sys.path]
            argument = json.dumps([child_end.fileno(), path, places])
            job = replace(job, command=[sys.executable, "-u", "-c", _BOOT, argument])
            if sandbox is None:
                launch, folders = Launch([*job.command], {**job.env}, limits=job.limits), ()
            else:
                readable = (*sandbox.readable, *_our_files(), *files_of(path))
                launch, folders = replace(sandbox, readable=readable).launch(job), job.folders
            fds = [child_end.fileno()]
            process = AgentProcess.start(
                launch.command, env=launch.env, pass_fds=fds, limits=launch.limits, folders=folders
            )
            started = cls(process, reader, writer)
        try:
            answer = await asyncio.wait_for(started._answer(), BOOT_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):
            answer = {"failure": f"{KEY}={path} took longer than {BOOT_SECONDS:g} s to import"}
        except (asyncio.IncompleteReadError, ConnectionError):
            answer = {"failure": f"{KEY}={path} could not be imported: {await started.how_it_ended()}"}
        except BaseException:
            await started.end()
            raise
        if "failure" in answer:
            await started.end()
            failure = answer["failure"]
            if sandbox is not None and "NotFoundError" in failure:
                visible = "the function's own file or package and turnkey.agent.readable"
                failure = f"the sandbox shows only {visible}: {failure}"
            raise AgentFailure(failure)
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
        line = without_secret(self._process.last_line(), secret)
        if status == 137 and not line.startswith(OVER):
            how += " (SIGKILL, as the kernel sends when memory runs out)"
        return cut(f"the agent's process {how}{f': {line}' if line else ''}")

    async def end(self) -> None:
        """Kill it and all that it has started."""
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._process.end()


def absolute(path: str) -> str:
    """``path/to/file.py:function`` with the whole path of the file; ``module:function`` as it is."""
    module, _, name = path.rpartition(":")
    return f"{Path(module).expanduser().resolve()}:{name}" if module.endswith(".py") else path


def files_of(path: str) -> list[Path]:
    """What a process needs to import ``module:function``: its file, or the folder of its package.

    Not the folder around a file, which may be a user's home.
    """
    module = path.partition(":")[0]
    if module.endswith(".py"):
        return [Path(module)]
    with contextlib.suppress(ImportError, ValueError):
        if (spec := importlib.util.find_spec(module.partition(".")[0])) is not None:
            folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
            return folders or [Path(spec.origin or "").absolute()]
    return []


def _our_files() -> list[Path]:
    """The folder of this package, and in a checkout what the links in it stand for."""
    folders = files_of(__name__)
    return [*folders, *(path.resolve() for folder in folders for path in folder.iterdir() if path.is_symlink())]


class InProcessFunctionRunner(Runner):
    """Calls a function in this process, an ``async`` one on the event loop: a busy loop in it blocks all episodes.

    A function that is not ``async`` runs in a thread, which nothing can stop: after ``timeout`` its result is dropped.

    Raises:
        ModuleImportError: there is no such function.
    """

    def __init__(self, path: str, *, timeout: float, most_threads: int = 256) -> None:
        os.environ.update(without_proxy())
        self._path, self._function, self._timeout = path, load_function(path, KEY, *ARGUMENTS), timeout
        self._threads = DaemonThreads(most_threads, "agent")

    async def run(self, task: Mapping[str, Any], agent: AgentHandle) -> AgentResult:
        """As ``Runner.run``."""
        token = PLAYED.set(agent.key)
        try:
            played = call(self._function, self._path, task, agent, self._threads)
            outcome = await asyncio.wait_for(played, self._timeout)
        except (asyncio.TimeoutError, TimeoutError):
            return AgentResult(truncated=True, reason=ran_too_long(self._timeout))
        finally:
            PLAYED.reset(token)
        if agent.key in STRAYS:
            STRAYS.discard(agent.key)
            raise AgentFailure(f"{KEY}={self._path} {_KEPT}")
        return outcome


# --- a service that runs the agent: ``POST URL``, answered when the episode is over -----------------------------------

LATE = 60.0
"""seconds after which a thread gives up a service that answers too late"""


def is_url(run: str) -> bool:
    """Whether ``turnkey.agent.run`` is the address of a service."""
    return run.lower().startswith(("http://", "https://"))


class RemoteRunner(Runner):
    """Sends each episode to a service as ``{"task", "base_url", "key", "model"}``.

    The service runs the agent against ``base_url`` and answers when it has ended, with what a function may return: a
    number, ``{"reward", "success", "turns", "extra"}``, or null if the agent reports its reward itself.

    Args:
        url: of the service; a request that never reached it is sent again, any other is not.
        timeout: seconds that an episode may take; after them the gateway answers 404.

    Raises:
        EnvironmentKwargsError: ``url`` is not a URL.
    """

    def __init__(self, url: str, *, timeout: float, most_threads: int = 256) -> None:
        check_url(url, KEY)
        self.url, self._timeout = url, timeout
        self._threads = DaemonThreads(most_threads, "remote-agent")

    async def run(self, task: Mapping[str, Any], agent: AgentHandle) -> AgentResult:
        """As ``Runner.run``."""
        episode = {"task": dict(task), "base_url": agent.base_url, "key": agent.key, "model": agent.model}
        post = partial(post_json, self.url, episode, timeout=self._timeout + LATE, key=KEY)
        try:
            answer = asyncio.get_running_loop().run_in_executor(self._threads, post)
            result = await asyncio.wait_for(answer, self._timeout)
        except (asyncio.TimeoutError, TimeoutError):
            return AgentResult(truncated=True, reason=ran_too_long(self._timeout))
        except ServerError as error:
            return AgentResult(reason=cut(without_secret(str(error), agent.key)))
        return read_result(result, f"{KEY}={self.url}")


def address_towards(url: str, ipv6: bool = False) -> str:
    """The IP address of this machine from which it reaches the host of ``url``; nothing is sent.

    Raises:
        AgentFailure: the host has no address of that version of IP, or is not reachable.
    """
    parts, family = urlsplit(url), socket.AF_INET6 if ipv6 else socket.AF_INET
    try:
        place = socket.getaddrinfo(parts.hostname, parts.port or 80, family, socket.SOCK_DGRAM)[0][4]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return probe.getsockname()[0]
    except OSError as error:
        raise AgentFailure(f"{KEY}={url} cannot be reached: {error}") from None
