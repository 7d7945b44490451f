"""Calls of environments in threads that may take longer than anybody waits."""

from __future__ import annotations

import asyncio
import threading

import pytest

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.hosting.threads import ThreadWorker


class Slow:
    """A runner whose step returns when it is let go."""

    def __init__(self) -> None:
        self.begun, self.go, self.closed = threading.Event(), threading.Event(), threading.Event()
        self.log = []

    def step(self) -> None:
        self.begun.set()
        self.go.wait(20)
        self.log.append("stepped")

    def close(self) -> None:
        self.log.append("closed")
        self.closed.set()


async def late(worker: ThreadWorker, _: Slow) -> None:
    with pytest.raises(EnvironmentFailure, match=r"took longer than 0\.5 s"):  # in which the thread has begun
        await worker.call("step", (), 0.5, "step", "key")


async def cancelled(worker: ThreadWorker, runner: Slow) -> None:
    call = asyncio.create_task(worker.call("step", (), 20.0, "step", "key"))
    assert await asyncio.to_thread(runner.begun.wait, 20)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


@pytest.mark.parametrize("leaves", [late, cancelled])
def test_an_environment_that_nobody_waits_for_is_closed_once_when_its_call_returns(leaves):
    runner, idle = Slow(), []
    worker = ThreadWorker(idle, runner)
    asyncio.run(leaves(worker, runner))
    worker.kill()
    assert not runner.closed.wait(0.05), "its call has not returned"
    runner.go.set()
    assert runner.closed.wait(20)
    assert runner.log == ["stepped", "closed"]
    assert not idle, "the thread was not given back"


def test_without_an_open_call_it_is_closed_at_once():
    runner = Slow()
    ThreadWorker([], runner).kill()
    assert runner.closed.wait(20)
    assert runner.log == ["closed"]


def test_without_a_thread_to_be_had_a_call_fails_and_nothing_else_does(monkeypatch):
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    worker = ThreadWorker([], Slow())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(EnvironmentFailure, match=r"no thread could be started .* can't start new thread") as caught:
            asyncio.run(worker.call("step", (), 20.0, "step", "key"))
        worker.kill()
    assert caught.value.kind == "process"
