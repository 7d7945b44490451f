"""uvicorn as the gateway runs it: it leaves signals alone, and answers clients that have closed their own side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol  # httptools lets a URL or headers grow without end

BEGINNING = b"HTTP/1.1 "
"""of any response"""
PROBE_SECONDS = 0.02


class Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # those of this process are not uvicorn's


class Connection(H11Protocol):
    """A connection whose client may close its side once its request is sent, and still gets the reply.

    A client that is gone looks the same until something is written to it: its system, or a relay between, then resets
    the connection. So the beginning of the response is written at once, byte by byte.
    """

    def eof_received(self) -> bool:
        """Whether the connection stays open."""
        cycle: Any = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            return False
        cycle.keep_alive = cycle.waiting_for_100_continue = False
        if cycle.response_started:  # a stream, whose comments are probes
            return True
        transport, written = self.transport, 0

        def probe() -> None:
            nonlocal written
            if cycle.transport is not transport and written < len(BEGINNING) and not transport.is_closing():
                transport.write(BEGINNING[written : written + 1])
                written += 1
                self.loop.call_later(PROBE_SECONDS * (written > 1), probe)  # this machine answers the first at once

        def rest(response: bytes) -> None:
            cycle.transport = transport
            transport.write(response[written:])

        cycle.transport = SimpleNamespace(write=rest, close=transport.close)
        probe()
        return True
