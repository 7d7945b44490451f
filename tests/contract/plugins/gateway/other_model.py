"""A server of a model beside the policy, for real clients: it says which model it was asked for, and by which path."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class OtherModel:
    """``requests``: path, ``Authorization`` and body of each."""

    url: str
    requests: list[tuple[str, str | None, dict[str, Any]]] = field(default_factory=list)


def _chat(text: str, kind: str = "") -> dict[str, Any]:
    part = {"delta" if kind else "message": {"role": "assistant", "content": text}}
    choice = {"index": 0, "finish_reason": None if kind else "stop", **part}
    return {"id": "c", "object": f"chat.completion{kind}", "created": 0, "model": "big", "choices": [choice]}


@contextmanager
def other_model() -> Iterator[OtherModel]:
    """Serve it; a request with ``"fail"`` as a message or input gets status 500, which quotes the key."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            key = self.headers.get("Authorization")
            served.requests.append((self.path, key, body))
            question = body.get("input") or body["messages"][-1]["content"]
            if question == "fail":
                self._send(500, "application/json", json.dumps({"error": f"no luck, {key}"}))
            elif body.get("stream"):
                chunks = [json.dumps(_chat(text, ".chunk")) for text in ("for ", body["model"])]
                events = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])
                self._send(200, "text/event-stream", events)
            elif self.path == "/v1/embeddings":
                data = [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}]
                answer = {
                    "object": "list",
                    "data": data,
                    "model": "big",
                    "usage": {"prompt_tokens": 1, "total_tokens": 1},
                }
                self._send(200, "application/json", json.dumps(answer))
            elif self.path == "/v1/responses":
                content = [{"type": "output_text", "text": "a response", "annotations": []}]
                item = {"id": "m", "type": "message", "role": "assistant", "status": "completed", "content": content}
                answer = {"id": "r", "object": "response", "created_at": 0, "model": "big", "output": [item]}
                self._send(200, "application/json", json.dumps(answer))
            else:
                self._send(200, "application/json", json.dumps(_chat(f"for {body['model']}")))

        def _send(self, status: int, kind: str, text: str) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served = OtherModel(f"http://127.0.0.1:{server.server_port}/v1")
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield served
        server.shutdown()
