"""A session with an MCP server. An asyncio task of its own owns it; after ``close`` no stdio server runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from importlib import import_module
from typing import Any

from verl_turnkey.envs import guard
from verl_turnkey.envs.answers import plain_text
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.http import on_this_machine
from verl_turnkey.envs.mcp_servers.servers import Server

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
                read, write, *_ = await stack.enter_async_context(self._streams())
                client = await stack.enter_async_context(ClientSession(read, write))
                await client.initialize()
                self.tools = await _listed(client)
                self._client = client
                self._opened.set()
                await self._end.wait()
        except Exception as error:  # of any library below, and groups of them
            self._breaks(_first(error))

    def _streams(self) -> Any:
        return self._stdio() if self.server.url is None else self._http()

    @contextlib.asynccontextmanager
    async def _stdio(self) -> AsyncIterator[Any]:
        from mcp import StdioServerParameters, stdio_client

        # Under the guard: no process of the server survives it, and its output is bounded.
        command = ["-I", "-S", guard.__file__, str(self._most_bytes), *self.server.command]
        variables = self.server.variables
        parameters = StdioServerParameters(command=sys.executable, args=command, env=variables, cwd=self.server.cwd)
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
