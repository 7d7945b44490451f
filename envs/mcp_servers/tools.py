"""The tools of MCP servers in an episode: a session of its own with each server, or one that episodes share.

An asyncio task of its own owns a session; after ``close`` no stdio server runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from importlib import import_module
from typing import Any

from verl_turnkey.envs import process_tree
from verl_turnkey.envs.answers import plain_text
from verl_turnkey.envs.base import digest
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.http import on_this_machine
from verl_turnkey.envs.mcp_servers.servers import OF_TASK, Server
from verl_turnkey.envs.tasks import Task
from verl_turnkey.envs.tools import read_tools

CONNECTION_CLOSED = -32000  # what the package mcp calls an error that is not the server's own
CLOSE_SECONDS = 10.0  # more than a stdio server is left
MOST_PAGES = 100
"""of a server's list of tools"""


class Session:
    """A session with ``server``.

    Args:
        server: with its variables filled in.
        most_bytes: that a server may write for one message of ours.
    """

    def __init__(self, server: Server, most_bytes: int) -> None:
        self.server, self._most_bytes = server, most_bytes
        self.tools: list[dict[str, Any]] = []
        """of the server: ``name``, ``description`` and ``inputSchema`` each"""
        self._end, self._opened = asyncio.Event(), asyncio.Event()
        self._broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._calls: set[asyncio.Future[Any]] = set()
        self._client: Any = None
        self._task: asyncio.Task[None] | None = None

    async def open(self, timeout: float) -> None:
        """Start the server, or connect to it, and list its tools.

        Raises:
            EnvironmentFailure: it does not start, or not within ``timeout`` seconds.
        """
        self._task = asyncio.create_task(self._run())
        opened = asyncio.ensure_future(self._opened.wait())
        try:
            await asyncio.wait({self._task, opened}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not self._opened.is_set():
                late = f"it was not ready within {timeout:g} seconds"
                raise self._failure(late if not self._task.done() else "it did not start")
        except BaseException:
            self._task.cancel()
            await self.close()
            raise
        finally:
            opened.cancel()

    async def call(self, tool: str, arguments: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """What the tool gives, as ``{"content", "is_error"}``.

        Raises:
            EnvironmentFailure: the server is gone, takes longer than ``timeout`` seconds, or writes too much.
        """
        call = asyncio.ensure_future(self._client.call_tool(tool, dict(arguments)))
        self._calls.add(call)
        try:
            await asyncio.wait({call, self._broken}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                raise self._failure(f"it broke down in {tool}")
            if not call.done():
                raise self._failure(f"{tool} took more than {timeout:g} seconds")
            try:
                result = call.result()
            except Exception as error:
                own = getattr(error, "error", None)  # of the protocol: what the server answers in place of a result
                if own is None or own.code == CONNECTION_CLOSED:
                    await self.close()  # its process may say why
                    raise self._failure(f"it broke down in {tool}: {error}") from None
                return {"content": f"Error: {plain_text(own.message)}", "is_error": True}
        finally:
            call.cancel()
            self._calls.discard(call)
        plain = result.model_dump(by_alias=True, mode="json")
        return {"content": _text(plain), "is_error": bool(plain.get("isError"))}

    async def close(self) -> None:
        """End the session and its server; a second call waits for the same end."""
        self._end.set()
        if self._task is not None and not (await asyncio.wait({self._task}, timeout=CLOSE_SECONDS))[0]:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def close_when_idle(self) -> None:
        """End the session once its last call has an answer, or no time left."""
        while self._calls:
            await asyncio.wait(set(self._calls))
        await self.close()

    async def _run(self) -> None:
        try:
            async with contextlib.AsyncExitStack() as stack:
                from mcp import ClientSession

                # It logs a traceback for each line of a stdio server that is not a message.
                logging.getLogger("mcp.client.stdio").setLevel(logging.CRITICAL)
                read, write, *_ = await stack.enter_async_context(
                    self._stdio() if self.server.url is None else self._http()
                )
                client = await stack.enter_async_context(ClientSession(read, write))
                await client.initialize()
                self.tools = await _listed(client)
                self._client = client
                self._opened.set()
                await self._end.wait()
        except Exception as error:  # of any library below, and groups of them
            self._breaks(_first(error))

    @contextlib.asynccontextmanager
    async def _stdio(self) -> AsyncIterator[Any]:
        from mcp import StdioServerParameters, stdio_client

        # Under the guard: no process of the server survives it, and its output is bounded.
        program, *command = process_tree.script("serve", self._most_bytes, *self.server.command)
        variables = self.server.variables
        parameters = StdioServerParameters(command=program, args=command, env=variables, cwd=self.server.cwd)
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            try:
                async with stdio_client(parameters, errlog=errors) as streams:
                    yield streams
            finally:
                errors.seek(0)
                if lines := [line for line in errors.read().splitlines() if line.strip()]:
                    self._breaks(lines[-1].strip())

    @contextlib.asynccontextmanager
    async def _http(self) -> AsyncIterator[Any]:
        from mcp.client import streamable_http
        from mcp.shared._httpx_utils import create_mcp_http_client

        assert self.server.url is not None
        client = create_mcp_http_client(headers=dict(self.server.headers))
        if on_this_machine(self.server.url):  # directly: a proxy cannot reach it
            options: Any = {"timeout": client.timeout, "follow_redirects": client.follow_redirects}
            options["mounts"] = dict.fromkeys(("all://", "http://", "https://"))
            client = type(client)(headers=client.headers, **options)
        async with client:
            _watch(client, self._most_bytes, self._breaks)
            async with streamable_http.streamable_http_client(self.server.url, http_client=client) as streams:
                yield streams

    def _breaks(self, reason: str) -> None:
        """The first reason counts."""
        if not self._broken.done():
            self._broken.set_result(reason)

    def _failure(self, what: str) -> EnvironmentFailure:
        reason = f" ({self._broken.result()[:300]})" if self._broken.done() else ""
        return EnvironmentFailure("tools", f"MCP server {self.server.name}: {plain_text(what)}{reason}")


async def _listed(client: Any) -> list[dict[str, Any]]:
    types = import_module("mcp.types")
    tools, cursor = [], None
    for _ in range(MOST_PAGES):
        page = await client.list_tools(params=types.PaginatedRequestParams(cursor=cursor) if cursor else None)
        plain = page.model_dump(by_alias=True, mode="json", exclude_none=True)
        tools += plain["tools"]
        cursor = plain.get("nextCursor")
        if not cursor:
            break
    return tools


def _watch(client: Any, most_bytes: int, breaks: Any) -> None:
    """Have the HTTP client of a session report connections that fail and answers that are too long."""
    send = client.send

    async def watched(request: Any, **options: Any) -> Any:
        try:
            response = await send(request, **options)
        except Exception as error:
            if request.method == "POST":
                breaks(f"{type(error).__name__}: {error}")
            raise
        if request.method == "POST":
            status, kind = response.status_code, response.headers.get("content-type", "")
            if status >= 400 and (status in (401, 403, 404) or not kind.startswith("application/json")):
                breaks(f"HTTP status {status}")
            response.stream = _bounded(response.stream, most_bytes, breaks)
        return response

    client.send = watched


def _bounded(stream: Any, most_bytes: int, breaks: Any) -> Any:
    class Bounded(import_module(type(stream).__module__.partition(".")[0]).AsyncByteStream):
        async def __aiter__(self) -> AsyncIterator[bytes]:
            seen = 0
            async for chunk in stream:
                seen += len(chunk)
                if seen > most_bytes:
                    breaks(f"it wrote more than {most_bytes} bytes for one message")
                    return
                yield chunk

        async def aclose(self) -> None:
            await stream.aclose()

    return Bounded()


def _text(result: Mapping[str, Any]) -> str:
    """The text of a result. What is not text is named: a tool's message has room for text alone."""
    parts = [_part(part) for part in result.get("content") or ()]
    if not parts and result.get("structuredContent") is not None:
        parts = [json.dumps(result["structuredContent"], ensure_ascii=False)]
    return plain_text("\n".join(parts))


def _part(part: Mapping[str, Any]) -> str:
    resource = part.get("resource") or {}
    text = part.get("text", resource.get("text"))
    if text is not None:
        return text
    if part["type"] == "resource_link":
        return str(part["uri"])
    return f"[{part.get('mimeType') or resource.get('mimeType') or part['type']}: not shown]"


def _first(error: BaseException) -> str:
    """The first exception that is not a group, of a group as task groups raise them."""
    while inner := getattr(error, "exceptions", ()):
        error = inner[0]
    return f"{type(error).__name__}: {error}"


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
