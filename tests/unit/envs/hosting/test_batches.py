"""Many calls in one remote call: every answer comes, to whom it belongs, as soon as it is there."""

import asyncio
import gc
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting import batches
from verl_turnkey.envs.hosting.batches import MOST_TAKING, BatchedCalls, BatchServer


class Target:
    """What the calls do."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.gates: dict[str, asyncio.Event] = {}

    async def echo(self, text: str) -> str:
        self.seen.append(text)
        return text

    async def held(self, gate: str) -> str:
        await self.gates.setdefault(gate, asyncio.Event()).wait()
        return gate

    async def open(self, gate: str) -> None:
        self.gates.setdefault(gate, asyncio.Event()).set()

    async def fail(self, kind: str) -> None:
        if kind == "strange":
            raise type("Strange", (Exception,), {})("of no module")
        raise EnvironmentFailure(kind, "as asked")


class Wire:
    """A remote call without Ray: the server is in the same loop, and each call is counted."""

    def __init__(self) -> None:
        self.target = Target()
        self.server = BatchServer(self.target)
        self.sizes: list[int] = []
        self.answered: list[int] = []
        self.broken: Exception | None = None

    def __call__(self, name: str, window: float, batch: list[Any]) -> Future[Any]:
        if any(threading.Lock in map(type, args) or "unsendable" in args for _, _, args in batch):
            raise TypeError("cannot be sent")
        self.sizes.append(len(batch))
        answer: Future[Any] = Future()
        task = asyncio.ensure_future(self.server.exchange(name, window, batch))

        def done(task: asyncio.Task[Any]) -> None:
            if task.cancelled():
                answer.cancel()
            elif self.broken is not None:
                answer.set_exception(self.broken)
            else:
                self.answered.append(len(task.result()))
                answer.set_result(task.result())

        task.add_done_callback(done)
        return answer


def wired(episodes: int = 1) -> tuple[Wire, BatchedCalls]:
    wire = Wire()
    return wire, BatchedCalls(wire, lambda: episodes)


async def test_calls_of_one_turn_of_the_loop_travel_together():
    wire, calls = wired()
    texts = [str(n) for n in range(300)]
    assert await asyncio.gather(*(calls.call("echo", text) for text in texts)) == texts
    assert wire.target.seen == texts  # in their order
    assert wire.sizes[0] == 300
    assert len(wire.sizes) <= 2


@pytest.mark.parametrize(("episodes", "sizes"), [(0, [1] * 6), (1000, [1, 5])])
async def test_calls_that_come_one_by_one_travel_together_when_many_episodes_are_open(monkeypatch, episodes, sizes):
    monkeypatch.setattr(batches, "LONGEST", 2.0)
    monkeypatch.setattr(batches, "EACH", 1.0)
    wire, calls = wired(episodes)
    held = calls.call("held", "gate")  # so that the end need not ask for answers
    await asyncio.sleep(0)
    answers = []
    for n in range(5):
        answers.append(calls.call("echo", str(n)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert await asyncio.gather(*answers) == [str(n) for n in range(5)]
    assert [size for size in wire.sizes if size] == sizes
    await calls.call("open", "gate")
    await held


async def test_answers_that_come_one_by_one_travel_together_when_many_episodes_are_open(monkeypatch):
    monkeypatch.setattr(batches, "LONGEST", 2.0)
    monkeypatch.setattr(batches, "EACH", 1.0)
    wire, calls = wired(1000)
    assert await calls.call("echo", "first") == "first"
    held = [calls.call("held", f"gate {n}") for n in range(5)]
    while len(wire.target.gates) < 5:
        await asyncio.sleep(0.001)
    sent = len(wire.answered)
    for n in range(5):
        await wire.target.open(f"gate {n}")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await asyncio.gather(*held)
    together = [size for size in wire.answered[sent:] if size]
    assert (sum(together), len(together) <= 2) == (5, True)  # a window may end meanwhile


async def test_an_answer_does_not_wait_for_those_it_was_asked_with():
    _, calls = wired()
    slow = [calls.call("held", f"gate {n}") for n in range(3)]
    assert await calls.call("echo", "fast") == "fast"
    for n in (1, 2, 0):
        assert not slow[n].done()
        await calls.call("open", f"gate {n}")
        assert await slow[n] == f"gate {n}"


async def test_a_call_that_fails_fails_alone():
    _, calls = wired()
    requests = [("echo", "a"), ("fail", "step"), ("echo", "unsendable"), ("fail", "strange"), ("echo", "b")]
    answers = await asyncio.gather(*(calls.call(*request) for request in requests), return_exceptions=True)
    assert [answers[0], answers[4]] == ["a", "b"]
    assert (type(answers[1]), answers[1].kind) == (EnvironmentFailure, "step")
    assert (type(answers[2]), str(answers[2])) == (TypeError, "cannot be sent")
    assert (type(answers[3]), str(answers[3])) == (RuntimeError, "Strange: of no module")
    assert await calls.call("echo", "c") == "c"


async def test_the_end_of_the_host_fails_all_that_wait_and_later_calls():
    wire, calls = wired()
    waiting = [calls.call("held", "never") for _ in range(2)]
    await asyncio.sleep(0.05)
    wire.broken = ConnectionError("gone")
    answers = await asyncio.gather(calls.call("echo", "a"), *waiting, return_exceptions=True)
    assert answers == [wire.broken] * 3
    with pytest.raises(ConnectionError):
        await calls.call("echo", "b")
    await wire.target.open("never")


def test_what_is_told_is_done_after_what_was_asked_before_even_when_the_loop_ends():
    async def main() -> list[str]:
        wire, calls = wired()
        assert await calls.call("echo", "a") == "a"
        answer = calls.call("echo", "b")
        calls.tell("echo", "c")
        assert wire.sizes[-1] == 2
        await answer
        calls.tell("fail", "step")  # nobody hears of it
        assert await calls.call("echo", "d") == "d"
        return wire.target.seen

    assert asyncio.run(main()) == ["a", "b", "c", "d"]


async def test_callers_that_go_away_leave_nothing_behind():
    complaints = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    wire, calls = wired()
    other = BatchedCalls(wire, lambda: 1)
    held = calls.call("held", "gate")
    held.cancel()
    assert await other.call("echo", "x") == "x"  # another caller is not given the answer
    await calls.call("open", "gate")
    for _ in range(3):
        await asyncio.sleep(0.01)
    assert calls._waiting == {}
    assert calls._out == other._out == 0
    assert all(not c.taking and not c.ready and not c.running for c in wire.server._callers.values())
    gc.collect()
    assert complaints == []


async def test_remote_calls_do_not_pile_up_behind_one_that_takes_long():
    wire, calls = wired()
    held = calls.call("held", "gate")  # such as a start that waits for room
    for n in range(1000):
        calls.tell("echo", "told")
        if n % 10 == 0:
            assert await calls.call("echo", str(n)) == str(n)
        (caller,) = wire.server._callers.values()
        assert len(caller.taking) <= MOST_TAKING
    for _ in range(3):
        await asyncio.sleep(0.01)
    assert 1 <= calls._out <= MOST_TAKING
    await calls.call("open", "gate")
    assert await held == "gate"
