"""A small model server on a port and on a unix socket, as the gateway has them."""

import json
import socketserver
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from verl_turnkey.envs.agents.base import AgentHandle

Answer = Callable[[str, dict[str, Any]], dict[str, Any]]


class _Tcp(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


class _Unix(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


@contextmanager
def gateway(answer: Answer) -> Iterator[AgentHandle]:
    """Serve ``answer(path, body)``; the handle of one episode, whose secret is ``s3cret``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            reply = json.dumps(answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args: Any) -> None:
            pass

        def address_string(self) -> str:
            return "client"

    with tempfile.TemporaryDirectory(prefix="gw") as folder:
        path = str(Path(folder, "s"))
        with _Tcp(("127.0.0.1", 0), Handler) as tcp, _Unix(path, Handler) as unix:
            for server in (tcp, unix):
                threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
            try:
                yield AgentHandle(f"http://127.0.0.1:{tcp.server_address[1]}/s3cret/v1", "k3y", "policy", socket=path)
            finally:
                tcp.shutdown()
                unix.shutdown()


def completion(message: dict[str, Any]) -> dict[str, Any]:
    """A chat completion with ``message``."""
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [choice],
        "usage": usage,
    }
