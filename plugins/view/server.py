"""The live page of a run: served to this machine only, with its current data.

Addresses begin with a random token, the ``Host`` of a request must be this machine, only GET is answered, and no part
of an address becomes a path on disk: names of blocks are looked up in a dictionary.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
import time
import warnings
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from verl_turnkey.plugins.view.join import find_log, load
from verl_turnkey.plugins.view.pack import Blocks
from verl_turnkey.plugins.view.page import blocks, html

REST = 5.0
"""seconds between two looks at the disk, for all clients; after a slow build at least four times its duration"""
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Built(NamedTuple):
    version: str
    blocks: Blocks


class Data:
    """The data that the page requests, rebuilt when a log has new files."""

    def __init__(self, folders: Sequence[Path], rest: float = REST) -> None:
        self._folders, self._rest = list(folders), rest
        self._lock, self._next = threading.Lock(), 0.0
        self._built = self._build()

    def now(self) -> Built:
        """The newest data; a request during a rebuild gets the data before it."""
        if time.monotonic() >= self._next and self._lock.acquire(blocking=False):
            try:
                if self._version() != self._built.version:
                    self._built = self._build()
                else:
                    self._next = time.monotonic() + self._rest
            except (OSError, ValueError) as error:  # a disk error, a moved log: keep the data
                self._next = time.monotonic() + self._rest
                warnings.warn(f"{self._folders}: {error}", stacklevel=2)
            finally:
                self._lock.release()
        return self._built

    def block(self, name: str, version: str) -> bytes | None:
        """A block of the newest version; None for another version, after which the page reloads everything."""
        built = self._built
        return built.blocks.get(name) if built.version == version else None

    def _build(self) -> Built:
        begun, version = time.monotonic(), self._version()  # before reading: later files make a new version
        built = Built(version, blocks([load(folder) for folder in self._folders]))
        took = time.monotonic() - begun
        self._next = time.monotonic() + (max(self._rest, 4 * took) if self._rest else 0)
        return built

    def _version(self) -> str:
        files = hashlib.sha256()
        for log in map(find_log, self._folders):
            for path in sorted([*log.glob("*/step=*/*.parquet"), *log.glob("*.json")]):
                files.update(f"{path}\n".encode("utf-8", "surrogateescape"))
        return files.hexdigest()[:16]


def server(data: Data, port: int = 0) -> tuple[ThreadingHTTPServer, str]:
    """A server for ``data`` on 127.0.0.1, not yet running, and its address."""
    token = secrets.token_urlsafe(24)

    class Handler(_Handler):
        source, secret = data, token

    http_server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    http_server.daemon_threads = True
    return http_server, f"http://127.0.0.1:{http_server.server_address[1]}/{token}/"


class _Handler(BaseHTTPRequestHandler):
    source: Data
    secret: str
    server_version, sys_version, protocol_version = "turnkey", "", "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        token, _, rest = url.path.removeprefix("/").partition("/")
        port = self.server.server_address[1]  # pyright: ignore[reportIndexIssue]
        # DNS rebinding: another site may point its name at 127.0.0.1; its requests carry that name.
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            return self._answer(403, f"expected the address http://127.0.0.1:{port}/".encode())
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self.secret.encode()):
            return self._answer(404, b"")
        if rest == "":
            return self._answer(200, html({}, live=True).encode(), "text/html; charset=utf-8")
        if rest == "version":
            return self._answer(200, self.source.now().version.encode(), "text/plain")
        name = rest.removeprefix("data/")
        block = self.source.block(name, parse_qs(url.query).get("version", [""])[0]) if name != rest else None
        return self._answer(404, b"") if block is None else self._answer(200, block, "application/octet-stream")

    def _answer(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        for name, value in (HEADERS | {"Content-Type": kind, "Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silent: a log line would contain the token."""
