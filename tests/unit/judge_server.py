"""An OpenAI-compatible endpoint on a loopback port that does what a test tells it to, and counts."""

import json
import math
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer:
    """``answer`` gives the model's text for a question, or probabilities of its first token, as vLLM does for
    ``logprobs``; ``replies`` come first, one raw (status, headers, body) each.

    ``delay``: seconds before a reply. ``drip``: seconds between the bytes of a body.
    """

    def __init__(self, answer: Callable[[dict[str, Any]], str | dict[str, float]] = lambda _: "Score: 7") -> None:
        self.answer = answer
        self.replies: list[tuple[int, dict[str, str], str]] = []
        self.delay = self.drip = 0.0
        self.questions: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer._serve(self)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.root = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.url = f"{self.root}/v1"

    @property
    def calls(self) -> int:
        return len(self.questions)

    def __enter__(self) -> "JudgeServer":
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, request: BaseHTTPRequestHandler) -> None:
        question = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        with self._lock:
            self.questions.append(question)
            self.headers.append(dict(request.headers))
            self.paths.append(request.path)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            reply = self.replies.pop(0) if self.replies else None
        try:
            time.sleep(self.delay)
            status, headers, body = reply or (200, {}, completion(self.answer(question)))
        finally:
            with self._lock:
                self.at_once -= 1
        data = body.encode()
        try:
            request.send_response(status)
            for name, value in headers.items():
                request.send_header(name, value)
            if "Content-Length" not in headers:
                request.send_header("Content-Length", str(len(data)))
            request.end_headers()
            for piece in [data] if not self.drip else [data[i : i + 1] for i in range(len(data))]:
                request.wfile.write(piece)
                request.wfile.flush()
                time.sleep(self.drip)
        except OSError:  # the client has gone
            pass


def completion(answer: str | dict[str, float]) -> str:
    text, logprobs = answer, None
    if not isinstance(answer, str):
        tokens = [
            {"token": token, "logprob": math.log(p), "bytes": [*token.encode()]}
            for token, p in sorted(answer.items(), key=lambda item: -item[1])
        ]
        text, logprobs = tokens[0]["token"], {"content": [{**tokens[0], "top_logprobs": tokens}]}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": logprobs}
    return json.dumps({"object": "chat.completion", "choices": [choice]})
