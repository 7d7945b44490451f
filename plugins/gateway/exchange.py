"""A request and its response on one connection, as ASGI has them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from verl_turnkey.plugins.gateway.messages import Dialect, GatewayError

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

BODY_BYTES = 32 * 2**20
"""most bytes of a request's body"""
BODIES_BYTES = 8 * BODY_BYTES
"""most bytes of bodies, and of images in them, that one episode sends at the same time; further requests wait"""
BODY_SECONDS = 60.0
"""longest wait for the next part of a body, or until there is room for it"""
Take = Callable[[int], Awaitable[None]]


class Bodies:
    """The bodies that one episode sends at the same time: together at most :data:`BODIES_BYTES`."""

    def __init__(self) -> None:
        self.bytes = 0
        """that have come, or are announced"""
        self.decoding = asyncio.Lock()
        """held while images are decoded: one body of a few kilobytes may become 200 MB"""
        self._freed = asyncio.Event()

    @contextmanager
    def receiving(self) -> Iterator[Take]:
        """Count a request's body until it is answered; the function takes a number of bytes once there is room.

        Raises:
            GatewayError: there was none for :data:`BODY_SECONDS`; the client may send them again later.
        """
        taken = 0

        async def take(size: int) -> None:
            nonlocal taken
            until = asyncio.get_running_loop().time() + BODY_SECONDS
            while self.bytes > taken and self.bytes + size > BODIES_BYTES:
                try:
                    await asyncio.wait_for(self._freed.wait(), until - asyncio.get_running_loop().time())
                except (asyncio.TimeoutError, TimeoutError):
                    words = f"an episode may send at most {BODIES_BYTES} bytes at once"
                    raise GatewayError(503, "overloaded", words) from None
            taken += size
            self.bytes += size

        try:
            yield take
        finally:
            self.bytes -= taken
            self._freed.set()
            self._freed = asyncio.Event()


class Gone(Exception):
    """The client has closed the connection."""


class Exchange:
    """A request and its response. The response begins late, so that an error still has its status."""

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self._listening: asyncio.Task[None] | None = None
        self.gone = False
        self._streaming = False

    async def body(self, length: str | None, take: Take) -> bytes:
        """The body. ``length``: as its header says; ``take`` is called with it, or else with that of each part.

        Raises:
            GatewayError: it is too long, or too slow.
            Gone: the client has closed the connection.
        """
        too_long = GatewayError(413, "invalid_request", f"the body of a request may have at most {BODY_BYTES} bytes")
        announced = int(length) if length is not None and length.isdigit() else None
        if announced is not None and announced > BODY_BYTES:
            raise too_long
        await take(announced or 0)
        parts, size = [], 0
        while True:
            try:
                message = await asyncio.wait_for(self._receive(), BODY_SECONDS)
            except (asyncio.TimeoutError, TimeoutError):
                raise GatewayError(408, "invalid_request", "the body did not arrive in time") from None
            if message["type"] == "http.disconnect":
                raise Gone
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if announced is None:
                await take(len(parts[-1]))
            if size > BODY_BYTES:
                raise too_long
            if not message.get("more_body"):
                self._listening = asyncio.create_task(self._listen())
                return b"".join(parts)

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True

    async def wait(self, running: asyncio.Task[Any], seconds: float) -> bool:
        """Whether a task is done after that time.

        Raises:
            Gone: the client no longer waits; the task goes on, for a client that asks again.
        """
        assert self._listening is not None
        done, _ = await asyncio.wait({running, self._listening}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        if self._listening in done:
            raise Gone
        return running in done

    async def json(self, status: int, body: Any) -> None:
        await self.whole(status, json.dumps(body, ensure_ascii=False).encode("utf-8", "replace"), "application/json")

    async def whole(self, status: int, payload: bytes, kind: str) -> None:
        """A response in one piece; ``kind``: its content type."""
        headers = [(b"content-type", kind.encode("latin-1")), (b"content-length", str(len(payload)).encode())]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": payload})

    async def part(self, payload: bytes | None, kind: str) -> None:
        """The next part of a stream of content type ``kind``; None: its end.

        Raises:
            Gone: the client no longer waits.
        """
        if self.gone:
            raise Gone
        await self._begin_stream(kind)
        await self._send({"type": "http.response.body", "body": payload or b"", "more_body": payload is not None})

    async def ping(self) -> None:
        await self._begin_stream()
        await self._send({"type": "http.response.body", "body": b": ping\n\n", "more_body": True})

    async def events(self, events: list[str]) -> None:
        await self._begin_stream()
        payload = "".join(events).encode("utf-8", "replace")
        await self._send({"type": "http.response.body", "body": payload})

    async def error(self, error: GatewayError, dialect: Dialect | None) -> None:
        """Answer with an error, in a stream that has begun as an event."""
        body = {"error": {"message": error.message, "code": error.code}} if dialect is None else dialect.error(error)
        with suppress(Exception):  # nobody may be there
            if self._streaming:
                event = f"event: error\ndata: {json.dumps(body)}\n\n"
                await self._send({"type": "http.response.body", "body": event.encode()})
            else:
                await self.json(error.status, body)

    def close(self) -> None:
        if self._listening is not None:
            self._listening.cancel()

    async def _begin_stream(self, kind: str = "text/event-stream; charset=utf-8") -> None:
        if not self._streaming:
            self._streaming = True
            headers = [(b"content-type", kind.encode("latin-1")), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
