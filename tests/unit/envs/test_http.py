"""Calls of servers by HTTP, and the threads that wait for them, which end with the process."""

import gc
import http.client
import socket
import threading

import pytest
from loopback import Refusal, serve

from verl_turnkey.envs import EnvironmentKwargsError
from verl_turnkey.envs.daemon_threads import DaemonThreads
from verl_turnkey.envs.http import _CONNECTIONS, ServerError, check_url, post_json


def test_errors_of_http():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{free.getsockname()[1]}"  # where nobody listens
        with pytest.raises(ServerError, match=r"cannot be reached .* set in some.key"):
            post_json(dead, {}, timeout=1.0, key="some.key")

    def flaky(payload):
        if len(requests) < 3:
            raise Refusal(503)
        return {"calls": len(requests)}

    def slow(payload):
        answered.wait(60.0)

    answered = threading.Event()
    routes = {"/flaky": flaky, "/no": lambda _: b"<html>", "/cut": lambda _: None, "/slow": slow}
    with serve(routes) as (url, requests):
        assert post_json(f"{url}/flaky", {}, timeout=20.0, key="k", repeatable=True) == {"calls": 3}
        requests.clear()
        with pytest.raises(ServerError, match="answered 503"):
            post_json(f"{url}/flaky", {}, timeout=20.0, key="k")
        with pytest.raises(ServerError, match="no JSON"):
            post_json(f"{url}/no", {}, timeout=20.0, key="k")
        for path in ("/cut", "/slow"):  # neither may be sent a second time: it may have been carried out
            requests.clear()
            with pytest.raises(ServerError, match=r"did not answer within 3 s or broke off"):
                post_json(url + path, {}, timeout=3.0, key="k")
            assert len(requests) == 1
        answered.set()
    for bad in ("127.0.0.1:80", "ftp://x", "http://", "http://x:port", 7, None):
        with pytest.raises(EnvironmentKwargsError, match=r"some\.key must be a URL"):
            check_url(bad, "some.key")


def test_a_call_does_not_wait_for_acknowledgements(monkeypatch):
    """Header and body in two packets with Nagle's algorithm cost 40 ms a call."""
    at_once = []

    class Watched(http.client.HTTPConnection):
        def request(self, *args, **kwargs):
            at_once.append(self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            super().request(*args, **kwargs)

    monkeypatch.setitem(_CONNECTIONS, "http", Watched)
    with serve({"/": lambda payload: payload}) as (url, _):
        assert post_json(url, {"text": "x" * 2000}, timeout=20.0, key="k") == {"text": "x" * 2000}
    assert at_once == [1]


def named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_no_more_threads_than_allowed_at_once():
    """Three calls meet in three threads; the others wait for them."""
    meet, pool = threading.Barrier(3), DaemonThreads(3, "three")
    futures = [pool.submit(lambda n: (meet.wait(60), n)[1], n) for n in range(9)]
    assert [future.result(60) for future in futures] == [*range(9)]
    assert len(named("three")) == 3


def test_nobody_waits_for_them_at_the_end_of_the_process():
    pool, release = DaemonThreads(1, "stuck"), threading.Event()
    future = pool.submit(release.wait, 60)
    assert [thread.daemon for thread in named("stuck")] == [True]
    release.set()
    assert future.result(60)


def test_an_error_is_that_of_the_call():
    with pytest.raises(ZeroDivisionError):
        DaemonThreads(1, "failing").submit(lambda: 1 / 0).result(60)


def test_they_end_when_nobody_has_the_pool_any_more():
    pool = DaemonThreads(2, "left")
    assert pool.submit(id, pool).result(60)
    threads = named("left")
    del pool
    gc.collect()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
