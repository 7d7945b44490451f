"""The tools of MCP servers in an episode: a session of its own with each server, or one that episodes share."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from verl_turnkey.envs.base import digest
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.mcp_servers.servers import OF_TASK, Server
from verl_turnkey.envs.mcp_servers.session import Session
from verl_turnkey.envs.tasks import Task
from verl_turnkey.envs.tools import read_tools


class Servers:
    """The servers of a process, for all of its episodes.

    Args:
        servers: see ``read_servers``.
        shared: names of those that keep no state: all episodes share one session with each.
        tools: names of the tools that are shown; None: all.
        most_bytes: that a server may write for one message.
        start_timeout, call_timeout: seconds.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        shared: Collection[str] = (),
        tools: Collection[str] | None = None,
        most_bytes: int = 1 << 22,
        start_timeout: float = 120.0,
        call_timeout: float = 30.0,
    ) -> None:
        self._servers, self._shared_names, self._tools = servers, shared, tools
        self._most_bytes, self._start_timeout, self._call_timeout = most_bytes, start_timeout, call_timeout
        self._shared: dict[str, asyncio.Task[Session]] = {}
        self._starts = asyncio.Semaphore(len(os.sched_getaffinity(0)))  # Python alone needs a second of a CPU
        self._retired: set[asyncio.Task[None]] = set()

    async def episode(self, task: Task | None, taken: Collection[str] = ()) -> EpisodeTools:
        """Open the sessions of an episode.

        Args:
            task: what ``${TURNKEY_SEED}`` and ``${TURNKEY_TASK}`` stand for; None: only the list of tools is needed.
            taken: names of the episode's other tools.

        Raises:
            EnvironmentFailure: of kind ``tools``: a server does not start, or its tools cannot be shown.
        """
        tools = EpisodeTools(self)
        try:
            sessions, failures = await self._all_open(task, tools)
            for failure in failures.values():
                raise failure
            tools.name_all(sessions, taken, self._tools)
        except BaseException:
            await tools.close()
            raise
        return tools

    async def listed(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """The schemas of all tools that can be shown, and by server why it has none."""
        tools = EpisodeTools(self)
        try:
            sessions, failures = await self._all_open(None, tools)
            for name, session in sessions.items():
                try:
                    EpisodeTools(self).name_all({name: session}, (), None)
                except EnvironmentFailure as failure:
                    failures[name] = failure
            tools.name_all({name: s for name, s in sessions.items() if name not in failures}, (), None)
        finally:
            await tools.close()
        return tools.schemas, {name: getattr(error, "message", str(error)) for name, error in failures.items()}

    async def _all_open(
        self, task: Task | None, tools: EpisodeTools
    ) -> tuple[dict[str, Session], dict[str, BaseException]]:
        """The sessions with all servers, and what failed, by server."""
        opening = [self._open_for(server, task, tools.own) for server in self._servers]
        opened = dict(
            zip(
                (server.name for server in self._servers),
                await asyncio.gather(*opening, return_exceptions=True),
                strict=True,
            )
        )
        sessions = {name: session for name, session in opened.items() if isinstance(session, Session)}
        return sessions, {name: error for name, error in opened.items() if isinstance(error, BaseException)}

    async def call(self, session: Session | None, server: str, tool: str, arguments: Mapping[str, Any]) -> Any:
        """A result; ``session``: the episode's own with ``server``, None: the shared one."""
        if session is not None:
            return await session.call(tool, arguments, self._call_timeout)
        opening = self._opening(next(candidate for candidate in self._servers if candidate.name == server))
        shared = await asyncio.shield(opening)
        try:
            return await shared.call(tool, arguments, self._call_timeout)
        except EnvironmentFailure:
            if self._shared.get(server) is opening:  # further calls begin another one
                del self._shared[server]
                ending = asyncio.create_task(shared.close_when_idle())
                self._retired.add(ending)
                ending.add_done_callback(self._retired.discard)
            raise

    async def close(self) -> None:
        """End the shared sessions."""
        for opening in self._shared.values():
            await (await opening).close()
        if self._retired:
            await asyncio.wait(set(self._retired))
        self._shared.clear()

    def _opening(self, server: Server) -> asyncio.Task[Session]:
        opening = self._shared.get(server.name)
        if opening is None or (opening.done() and (opening.cancelled() or opening.exception() is not None)):
            opening = self._shared[server.name] = asyncio.create_task(self._open(server, OF_TASK))
        return opening

    async def _open_for(self, server: Server, task: Task | None, own: dict[str, Session]) -> Session:
        if server.name in self._shared_names:
            return await asyncio.shield(self._opening(server))
        variables = OF_TASK if task is None else {"TURNKEY_SEED": str(task.seed), "TURNKEY_TASK": task.to_json()}
        own[server.name] = session = await self._open(server, variables)
        return session

    async def _open(self, server: Server, variables: Mapping[str, str]) -> Session:
        try:
            filled = server.filled(variables)
        except ValueError as error:
            raise EnvironmentFailure("tools", str(error)) from None
        async with self._starts:
            session = Session(filled, self._most_bytes)
            await session.open(self._start_timeout)
        return session


class EpisodeTools:
    """The tools of one episode, by the names that the model sees."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self.own: dict[str, Session] = {}
        """the sessions that no other episode has, by server"""
        self._tools: dict[str, tuple[str, str]] = {}
        self.schemas: list[dict[str, Any]] = []
        self.state = ""
        """a digest of the calls so far of servers whose session is the episode's own, and of their results; empty
        before the first one"""

    def name_all(
        self, sessions: Mapping[str, Session], taken: Collection[str], enabled: Collection[str] | None
    ) -> None:
        """Give each tool its name: its own, or ``server_tool`` where another tool has it."""
        listed = [(name, tool) for name, session in sessions.items() for tool in session.tools]
        counts = Counter(tool["name"] for _, tool in listed) + Counter(set(taken))
        schemas = []
        for server, tool in listed:
            name = tool["name"]
            if counts[name] > 1:
                name = "_".join((re.sub(r"[^\w-]", "_", server), name))
            if name in self._tools or name in taken:
                raise EnvironmentFailure("tools", f"MCP server {server}: another tool is called {name!r}, too")
            self._tools[name] = server, tool["name"]
            function = {"name": name, "description": tool.get("description") or ""}
            schemas.append({"type": "function", "function": {**function, "parameters": tool["inputSchema"]}})
        if enabled is not None:
            if unknown := sorted(set(enabled) - self._tools.keys()):
                names = ", ".join(self._tools) or "none"
                raise EnvironmentFailure("tools", f"turnkey.mcp.tools names {unknown[0]!r}; the servers have {names}")
            self._tools = {name: tool for name, tool in self._tools.items() if name in enabled}
        try:
            self.schemas = read_tools([schema for schema in schemas if schema["function"]["name"] in self._tools])
        except TypeError as error:
            raise EnvironmentFailure("tools", f"of MCP servers: {error}") from None

    def has(self, name: str) -> bool:
        return name in self._tools

    async def result(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the call gives, as ``{"content", "is_error"}``.

        Raises:
            EnvironmentFailure: of kind ``tools``: the server is gone, hangs, or writes too much.
        """
        server, tool = self._tools[name]
        own = self.own.get(server)
        result = await self._servers.call(own, server, tool, arguments)
        if own is not None:
            self.state = digest(self.state, name, json.dumps(arguments, sort_keys=True), json.dumps(result))
        return result

    async def close(self) -> None:
        """End the episode's own sessions, and their servers."""
        ending = [asyncio.create_task(session.close()) for session in self.own.values()]
        if ending:
            await asyncio.wait(ending)
