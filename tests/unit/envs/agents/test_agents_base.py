"""What an agent is handed, and how failures travel."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle, SyncAgentHandle
from verl_turnkey.envs.errors import EnvironmentFailure


@pytest.fixture
def gateway() -> Iterator[tuple[AgentHandle, list[tuple[str, Any]]]]:
    reports: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            reports.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield AgentHandle(f"http://127.0.0.1:{server.server_port}/s3cret/v1", "key", "policy"), reports
    server.shutdown()
    server.server_close()


def test_reports_go_to_the_episode_beside_its_api(gateway: Any) -> None:
    handle, reports = gateway

    async def report() -> None:
        await handle.state("room 3")
        await handle.reward(1)
        await handle.reward(0.5, turn=2)

    asyncio.run(report())
    SyncAgentHandle(handle).state("room 4")
    SyncAgentHandle(handle).reward(2, turn=0)
    assert reports == [
        ("/s3cret/state", {"key": "room 3"}),
        ("/s3cret/reward", {"reward": 1.0}),
        ("/s3cret/reward", {"reward": 0.5, "turn": 2}),
        ("/s3cret/state", {"key": "room 4"}),
        ("/s3cret/reward", {"reward": 2.0, "turn": 0}),
    ]


def test_clients_have_address_and_key() -> None:
    handle = AgentHandle("http://127.0.0.1:1/secret/v1", "key", "policy")
    clients = (handle.client(max_retries=0), SyncAgentHandle(handle).client(max_retries=0))
    assert [type(client).__name__ for client in clients] == ["AsyncOpenAI", "OpenAI"]
    for client in clients:
        assert (str(client.base_url), client.api_key, client.max_retries) == (f"{handle.base_url}/", "key", 0)


def test_a_proxy_is_not_asked(gateway: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    handle, reports = gateway

    async def ask() -> None:
        async with handle.client(max_retries=0) as client:
            await client.post("/hello", body={}, cast_to=object)

    asyncio.run(ask())
    with SyncAgentHandle(handle).client(max_retries=0) as client:
        client.post("/hello", body={}, cast_to=object)
    assert [path for path, _ in reports] == ["/s3cret/v1/hello"] * 2


def test_a_failure_is_short_and_survives_pickling() -> None:
    failure = pickle.loads(pickle.dumps(AgentFailure("x" * 1000)))
    assert isinstance(failure, AgentFailure)
    assert isinstance(failure, EnvironmentFailure)
    assert failure.kind == "agent"
    assert failure.reason == failure.message == "x" * 297 + "..."
    assert str(failure) == f"agent failure: {failure.reason}"
