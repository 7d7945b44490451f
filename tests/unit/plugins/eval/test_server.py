"""A server of our own: reached past a proxy, with its own key, and waited for no longer than a deadline."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace

import pytest
from loopback import Refusal, serve

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.errors import JudgeError
from verl_turnkey.envs.http import Endpoint, EndpointConfig, on_this_machine
from verl_turnkey.plugins.eval.server import Server

NOWHERE = "http://127.0.0.1:9"


def endpoint(address: str, **options) -> Endpoint[str]:
    config = EndpointConfig(address, "m", **options, retries=0)
    return Endpoint(config, "/x", who="it", expected="a text", read=lambda answer: answer["said"], key="from-memory")


def test_a_server_on_this_machine_is_asked_without_a_proxy(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, NOWHERE)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serve({"/x": lambda _: {"said": "here"}}) as (address, _):
        assert asyncio.run(endpoint(address).ask({})) == "here"


@pytest.mark.parametrize(
    ("url", "here"),
    [
        *((f"http://{host}:8000/v1", True) for host in ("127.0.0.1", "127.0.1.1", "[::1]", "localhost", "a.localhost")),
        *((f"http://{host}/v1", False) for host in ("host", "10.0.0.5", "127.0.0.1.example.org", "[2001:db8::1]")),
    ],
)
def test_which_servers_are_on_this_machine(url, here):
    assert on_this_machine(url) == here


def test_a_key_in_memory_is_sent_and_never_shown(monkeypatch):
    monkeypatch.setenv("ANOTHER", "of-the-environment")
    before = dict(os.environ)

    def refuse(_):
        raise Refusal(401, "no such key: from-memory")

    with serve({"/x": refuse}) as (address, _), pytest.raises(JudgeError, match=r"no such key: \*\*\*"):
        asyncio.run(endpoint(address, api_key_env="ANOTHER").ask({}))
    assert endpoint(address)._login() == {"Authorization": "Bearer from-memory"}
    assert dict(os.environ) == before


def test_a_server_that_never_answers_is_not_waited_for_for_ever(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("loading weights\n")
    lives = SimpleNamespace(poll=lambda: None)
    with pytest.raises(ConfigError, match=r"(?s)did not answer for 0 seconds.*loading weights.*--server"):
        Server(lives, f"{NOWHERE}/v1", "key", log).wait(0.0)
