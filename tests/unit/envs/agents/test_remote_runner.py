"""Agents that a service runs: a real HTTP server answers what a function would return."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, ClassVar

import pytest

from verl_turnkey.envs.agents.base import AgentFailure, AgentHandle, Outcome
from verl_turnkey.envs.agents.remote import RemoteRunner, address_towards
from verl_turnkey.envs.errors import EnvironmentKwargsError

HANDLE = AgentHandle("http://127.0.0.1:1/secret/v1", "secret", "policy")


class Service(BaseHTTPRequestHandler):
    """Answers with the task's field ``answer``, after ``seconds``."""

    episodes: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        episode = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.episodes.append(episode)
        time.sleep(episode["task"].get("seconds", 0))
        body = json.dumps(episode["task"]["answer"]).encode()
        self.send_response(episode["task"].get("status", 200))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with suppress(BrokenPipeError):  # a client that has given up
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/run"
        server.shutdown()


def outcome(url: str, timeout: float = 5.0, **task: Any) -> Outcome:
    return asyncio.run(RemoteRunner(url, timeout=timeout).run(task, HANDLE))


def test_the_service_gets_the_task_and_the_gateway_and_answers_with_the_result(url: str) -> None:
    result = {"reward": 0.5, "success": True, "turns": {"1": 0.25}, "extra": {"files": 3}}
    assert outcome(url, answer=result) == Outcome(0.5, True, {1: 0.25}, {"files": 3})
    assert Service.episodes[-1] == {
        "task": {"answer": result},
        "base_url": "http://127.0.0.1:1/secret/v1",
        "key": "secret",
        "model": "policy",
    }
    assert outcome(url, answer=1) == Outcome(1.0)
    assert outcome(url, answer=None) == Outcome()


def test_a_service_that_fails_costs_its_episode(url: str) -> None:
    assert "answered 500" in outcome(url, answer="no such task", status=500).reason
    with pytest.raises(AgentFailure, match="must return a finite number"):
        outcome(url, answer="much")
    late = outcome(url, timeout=0.2, answer=1, seconds=1)
    assert (late.truncated, late.reward) == (True, None)
    assert late.reason == "the agent ran longer than turnkey.agent.timeout=0.2"


def test_a_service_that_is_not_there_is_named() -> None:
    assert "turnkey.agent.run" in outcome("http://127.0.0.1:9/run", answer=1).reason
    with pytest.raises(EnvironmentKwargsError, match=r"turnkey\.agent\.run must be a URL"):
        RemoteRunner("http://", timeout=1)
    with pytest.raises(EnvironmentKwargsError, match="without a login"):
        RemoteRunner("http://me:secret@host/run", timeout=1)
    with pytest.raises(EnvironmentKwargsError, match="must be a URL"):
        RemoteRunner("http://[::1/run", timeout=1)


def test_the_address_of_this_machine_is_that_of_the_route(url: str) -> None:
    assert address_towards(url) == "127.0.0.1"
    with pytest.raises(AgentFailure, match=r"turnkey\.agent\.run=http://nobody\.invalid/run cannot be reached"):
        address_towards("http://nobody.invalid/run")
