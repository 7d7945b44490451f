"""Many calls in one remote call: both ends of it, one in the process that calls and one in the host.

A remote call costs each side about half a millisecond of CPU, whatever it carries. So the calls of many episodes are
sent together, and so are their answers. No call waits for another: an answer goes back with the next remote call that
has arrived, not with the one that brought its question, and a call that fails fails alone.

A batch is collected in a window: the longer, the more episodes are open, ``EACH`` for each of them, but never longer
than ``LONGEST``. That is about a hundredth of a turn of some seconds. The number of calls under way would be the wrong
measure: at any time most episodes wait for the model, so few calls are under way, and each would travel alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from verl_turnkey.envs.errors import EnvironmentFailure

EACH, LONGEST = 50e-6, 25e-3  # seconds
MOST_TAKING = 4  # remote calls of one caller that wait in the host to take answers back: one would do

Call = tuple[int | None, str, tuple[Any, ...]]
"""number (None: nobody waits for the answer), method, arguments"""
Answer = tuple[int, BaseException | None, Any]
"""number of the call, what it raised, what it returned"""


class _Pace:
    """Calls ``send`` soon, and at most once in the window in which a batch is collected."""

    def __init__(self, loop: asyncio.AbstractEventLoop, send: Callable[[], None]) -> None:
        self._loop, self._send = loop, send
        self._sent = 0.0
        self._handle: asyncio.Handle | None = None

    def soon(self, window: float) -> None:
        if self._handle is None:
            wait = self._sent + window - self._loop.time()
            later = self._loop.call_later
            self._handle = later(wait, self.now) if wait > 0 else self._loop.call_soon(self.now)

    def now(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
        self._sent = self._loop.time()
        self._send()


class BatchedCalls:
    """The end that calls: for one host, in one event loop.

    Args:
        remote: sends a batch, under the name of this end and with the window, in seconds, in which its answers may be
            collected; gives the answers that are there when it comes back.
        episodes: how many are open, those that are being opened included.
    """

    def __init__(
        self, remote: Callable[[str, float, list[Call]], Future[list[Answer]]], episodes: Callable[[], int]
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._remote = remote
        self._episodes = episodes
        self._name = uuid4().hex
        self._numbers = itertools.count()
        self._unsent: list[Call] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._out = 0  # remote calls that have not come back
        self._pace = _Pace(self.loop, self._flush)

    def call(self, method: str, *args: Any) -> asyncio.Future[Any]:
        """The future answer of a call. What ``remote`` raises or ends with is the failure of all that wait."""
        number, future = next(self._numbers), self.loop.create_future()
        self._waiting[number] = future
        self._unsent.append((number, method, args))
        self._pace.soon(self._window())
        return future

    def tell(self, method: str, *args: Any) -> None:
        """A call without an answer, sent at once and after those before it: the loop may be about to end."""
        self._unsent.append((None, method, args))
        self._pace.now()

    def _window(self) -> float:
        return min(LONGEST, EACH * self._episodes())

    def _flush(self) -> None:
        batch, self._unsent = self._unsent, []
        self._send(batch)

    def _send(self, batch: list[Call]) -> None:
        try:
            answer = self._remote(self._name, self._window(), batch)
        except Exception as error:  # an argument that cannot be sent fails its own call
            if len(batch) > 1:
                for call in batch:
                    self._send([call])
            elif batch and batch[0][0] is not None:
                _settle(self._waiting.pop(batch[0][0]), error, None)
            return
        self._out += 1
        answer.add_done_callback(self._arrived)

    def _arrived(self, answer: Future[list[Answer]]) -> None:  # in a thread of Ray's
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._receive, answer)

    def _receive(self, answer: Future[list[Answer]]) -> None:
        self._out -= 1
        if (error := answer.exception()) is not None:
            waiting, self._waiting = self._waiting, {}
            for future in waiting.values():
                _settle(future, error, None)
            return
        for number, failure, result in answer.result():
            if number in self._waiting:
                _settle(self._waiting.pop(number), failure, result)
        if self._waiting and not self._out:
            self._send([])  # takes the answers that are still to come


@dataclass
class _Caller:
    """What a host knows of one :class:`BatchedCalls`."""

    pace: _Pace
    window: float = 0.0
    running: int = 0
    ready: list[Answer] = field(default_factory=list)
    taking: deque[asyncio.Future[list[Answer]]] = field(default_factory=deque)
    """remote calls that wait to take answers back"""


class BatchServer:
    """The host's end.

    Args:
        target: the object whose coroutine methods are called.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._callers: dict[str, _Caller] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def exchange(self, name: str, window: float, batch: Sequence[Call]) -> list[Answer]:
        """Start the calls of ``batch`` in their order, and give the answers of a window, to whatever calls.

        Returns no answers if none is due.
        """
        loop = asyncio.get_running_loop()
        if name not in self._callers:
            self._callers[name] = _Caller(_Pace(loop, lambda: self._give(name)))
        caller = self._callers[name]
        caller.window = window
        for call in batch:
            caller.running += 1
            task = loop.create_task(self._run(caller, *call))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        taken: asyncio.Future[list[Answer]] = loop.create_future()
        caller.taking.append(taken)
        while len(caller.taking) > MOST_TAKING:  # Ray bounds how many calls an actor holds
            _settle(caller.taking.popleft(), None, [])
        if caller.ready or not caller.running:
            caller.pace.soon(caller.window)
        return await taken

    async def _run(self, caller: _Caller, number: int | None, method: str, args: tuple[Any, ...]) -> None:
        failure: BaseException | None = None
        result = None
        try:
            result = await getattr(self._target, method)(*args)
        except EnvironmentFailure as error:
            failure = error
        except BaseException as error:  # of a class that might not be sent, and would fail the whole batch
            failure = RuntimeError(f"{type(error).__name__}: {error}")
        caller.running -= 1
        if number is not None:
            caller.ready.append((number, failure, result))
        caller.pace.soon(caller.window)

    def _give(self, name: str) -> None:
        caller = self._callers[name]
        if caller.ready and caller.taking:
            answers, caller.ready = caller.ready, []
            _settle(caller.taking.popleft(), None, answers)
        if not caller.running and not caller.ready:
            while caller.taking:
                _settle(caller.taking.popleft(), None, [])


def _settle(future: asyncio.Future[Any], failure: BaseException | None, result: Any) -> None:
    if future.done():  # its caller was cancelled
        return
    if failure is None:
        future.set_result(result)
    else:
        future.set_exception(failure)
