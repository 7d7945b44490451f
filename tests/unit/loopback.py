"""A JSON server on loopback for tests: a function per path, and a record of what was asked."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Refusal(Exception):
    """An answer with this status instead of 200."""

    def __init__(self, status: int, text: str = "no") -> None:
        super().__init__(text)
        self.status = status


@contextmanager
def serve(routes: dict[str, Callable[[dict[str, Any]], Any]]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """The address of a server that answers ``routes``, and the list of (path, payload) that it fills.

    A GET is answered as if None had been posted, and not recorded. A route that returns bytes has them sent as they
    are; None breaks the connection off without an answer.
    """
    requests: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path in routes:
                self.answer(None)
            else:
                self.send_error(404)

        def do_POST(self) -> None:
            payload = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            requests.append((self.path, payload))
            self.answer(payload)

        def answer(self, payload: Any) -> None:
            status = 200
            try:
                answer = routes[self.path](payload)
            except Refusal as refusal:
                status, answer = refusal.status, str(refusal).encode()
            if answer is None:
                return
            body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            header = f"HTTP/1.0 {status} -\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            self.wfile.write(header + body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
