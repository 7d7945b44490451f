"""What a host takes of the machine, what it measures, and calls in threads that may take longer than anybody waits."""

import asyncio
import threading
from pathlib import Path

import pytest

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.hosting import capacity
from verl_turnkey.envs.hosting.capacity import Measures
from verl_turnkey.envs.hosting.workers import ThreadWorker

MEMORY = "MemTotal:       8388608 kB\nMemFree:          524288 kB\nMemAvailable:    2097152 kB\n"


@pytest.mark.parametrize(
    ("meminfo", "free", "lacking"),
    [
        pytest.param(MEMORY, 2048, 0, id="enough"),
        pytest.param(MEMORY.replace("2097152", "524288"), 512, 819 - 512, id="less than a tenth is free"),
        pytest.param(MEMORY.partition("MemAvailable")[0], 4096, 0, id="unknown"),
    ],
)
def test_memory_of_a_machine_without_control_groups(meminfo, free, lacking, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(capacity, "_text", lambda path: meminfo if path == Path("/proc/meminfo") else "")
    assert capacity.free_memory_mb() == free
    assert capacity.lacking_memory_mb() == lacking


def test_a_reading_starts_anew():
    own = Measures()
    with own.timed("step"):
        assert own.in_flight == 1
        with pytest.raises(KeyError), own.timed("reset"):
            raise KeyError
    with own.timed("import"):
        own.lost += 1
    first = own.take()
    assert [len(first["step"]), len(first["reset"]), first["lost"], first["in_flight"]] == [1, 1, 1, 0]
    assert first["step"][0] >= first["reset"][0] >= 0
    again = own.take()
    assert [len(again["step"]), len(again["reset"]), again["lost"]] == [0, 0, 0]


def test_what_is_kept_is_bounded(monkeypatch):
    monkeypatch.setattr(capacity, "MOST", 3)
    own = Measures()
    for _ in range(5):
        with own.timed("step"):
            pass
    assert len(own.take()["step"]) == 3


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
    with pytest.raises(EnvironmentFailure, match=r"took longer than 5 s"):  # in which the thread has begun
        await worker.call("step", (), 5.0, "step", "key")


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
