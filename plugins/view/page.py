"""One HTML file that shows runs: it holds its scripts, styles and data, and loads nothing; and the live page of a run.

Texts of a run are not trusted. Python writes none of them into HTML: they are in blocks of base64, which cannot close
an element, and the scripts show them as text only. A content security policy names the hash of each script and style,
so nothing else runs or loads even if a text came through.

The live page is served to this machine only, with the run's current data. Addresses begin with a random token, the
``Host`` of a request must be this machine, only GET is answered, and POST of a note. No part of an address becomes a
path on disk: blocks are looked up by name, logs by number.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import math
import re
import secrets
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

from verl_turnkey.plugins.view.join import LoggedRun, NoLog, find_log, load
from verl_turnkey.plugins.view.notes import LONGEST, read_notes, writable, write_note
from verl_turnkey.plugins.view.pack import Blocks, pack, squeeze

ASSETS = Path(__file__).with_name("assets")
VENDOR = ("vendor/uPlot.iife.min.js", "vendor/dagre.min.js")
STYLES = ("vendor/uPlot.min.css", "view.css")
ENTRY = "main"

IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def blocks(runs: Sequence[LoggedRun], megabytes: float = math.inf) -> Blocks:
    """The data of a page of at most ``megabytes``: name -> compressed block; runs share the space equally."""
    space = megabytes * 1e6 - len(html({}, live=False))
    data = {"page": squeeze({"runs": len(runs)})}
    for number, run in enumerate(runs):
        data |= pack(run, number, space / len(runs))
    return data


def html(data: Blocks, *, live: bool) -> str:
    """The page. ``live``: it does not hold ``data``, its scripts request data from the server."""
    scripts = [*(_asset(name) for name in VENDOR), bundle()]
    styles = [_asset(name) for name in STYLES]
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(map(_hash, scripts)),
        "style-src": " ".join(map(_hash, styles)),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    if live:
        policy["connect-src"] = "'self'"
    security = "; ".join(f"{name} {value}" for name, value in policy.items())
    *vendor, module = scripts
    elements = {
        name: f'<script type="text/plain" id="{name}">{base64.b64encode(block).decode()}</script>'
        for name, block in ({} if live else data).items()
    }
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{security}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="referrer" content="no-referrer">',
        '<title>turnkey view</title><link rel="icon" href="data:,">',
        *(f"<style>{style}</style>" for style in styles),
        '</head><body><p class="page loading" id="reading">Reading …</p>',
        # Scripts run while the browser still reads the rest: numbers and texts, nearly all of the file.
        *(element for name, element in elements.items() if name.startswith(("page", "run-"))),
        *(f"<script>{script}</script>" for script in vendor),
        f'<script type="module" async>{module}</script>',
        *(element for name, element in elements.items() if not name.startswith(("page", "run-"))),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


@cache
def bundle() -> str:
    """The package's modules as one script: imported modules come first, each in its own scope.

    Raises:
        ValueError: an import cycle.
    """
    placed: dict[str, str] = {}

    def place(name: str, within: tuple[str, ...] = ()) -> None:
        if name in within:
            raise ValueError(f"import cycle: {' -> '.join((*within, name))}")
        if name in placed:
            return
        source = _asset(f"{name}.js")
        for _, needed in IMPORT.findall(source):
            place(needed, (*within, name))
        body = EXPORT.sub("", IMPORT.sub(r"const \1 = $\2;", source))
        placed[name] = f"const ${name} = (() => {{\n{body}return {{ {', '.join(EXPORT.findall(source))} }};\n}})();\n"

    place(ENTRY)
    return "".join(placed.values())


@cache
def _asset(name: str) -> str:
    text = (ASSETS / name).read_text(encoding="utf-8")
    if "</script" in text.lower() or "</style" in text.lower() or "<!--" in text:
        raise ValueError(f"assets/{name} would end its element in the page")
    return text


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


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

    def log(self, number: str) -> Path | None:
        """The log of a run of the page; None: it has no such run, or the log is gone."""
        runs = {str(i): folder for i, folder in enumerate(self._folders)}
        with suppress(NoLog):
            return find_log(runs[number]) if number in runs else None

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
        rest, url = self._place(), urlsplit(self.path)
        if rest is None:
            return None
        if rest == "":
            return self._answer(200, html({}, live=True).encode(), "text/html; charset=utf-8")
        if rest == "version":
            return self._answer(200, self.source.now().version.encode(), "text/plain")
        if log := self._log(rest):
            notes = {"notes": read_notes(log), "writable": writable(log)}
            return self._answer(200, json.dumps(notes).encode(), "application/json")
        name = rest.removeprefix("data/")
        block = self.source.block(name, parse_qs(url.query).get("version", [""])[0]) if name != rest else None
        return self._answer(404, b"") if block is None else self._answer(200, block, "application/octet-stream")

    def do_POST(self) -> None:
        self.close_connection = True  # what is refused is not read to its end
        rest = self._place()
        if rest is None:
            return None
        log = self._log(rest)
        if log is None:
            return self._answer(501, b"")
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,6}", length) or int(length) > 6 * LONGEST + 1000:
            return self._answer(413, f"a note has at most {LONGEST} characters".encode())
        try:
            write_note(log, self.rfile.read(int(length)))
        except ValueError as error:
            return self._answer(400, str(error).encode())
        except OSError as error:
            return self._answer(403, str(error.strerror).encode())
        return self._answer(200, b"")

    def _place(self) -> str | None:
        """The address behind the token; None: the request is refused, and answered."""
        token, _, rest = urlsplit(self.path).path.removeprefix("/").partition("/")
        port = self.server.server_address[1]  # pyright: ignore[reportIndexIssue]
        # DNS rebinding: another site may point its name at 127.0.0.1; its requests carry that name.
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self._answer(403, f"expected the address http://127.0.0.1:{port}/".encode())
        elif not hmac.compare_digest(token.encode("utf-8", "replace"), self.secret.encode()):
            self._answer(404, b"")
        else:
            return rest
        return None

    def _log(self, rest: str) -> Path | None:
        """The log whose notes the address ``rest`` names."""
        kind, _, number = rest.partition("/")
        return self.source.log(number) if kind == "notes" else None

    def _answer(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        for name, value in (HEADERS | {"Content-Type": kind, "Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Silent: a log line would contain the token."""
