"""Thread-safe environments: many in one process, their code in threads that can be left behind."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting.runner import Player


def overdue(what: str, timeout: float, key: str, more: str = "") -> EnvironmentFailure:
    """The failure of a call that exceeded its deadline, which the configuration key ``key`` sets."""
    return EnvironmentFailure("timeout", f"{what} took longer than {timeout:g} s; raise {key} if that is normal{more}")


class _Lane:
    """A thread that runs calls one after another. Left behind, not waited for, when a call hangs."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="turnkey-env", daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def abandon(self) -> None:
        """Let the thread end as soon as its running call returns, if ever."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)


class Threaded:
    """A place in the host's own process for one environment.

    Args:
        lanes: idle threads, shared by all such places of a host; grows as more calls run at the same time.
    """

    def __init__(self, lanes: list[_Lane], player: Player) -> None:
        self._lanes = lanes
        self._player = player
        self._busy = False

    async def call(self, method: str, args: tuple[Any, ...], timeout: float, what: str, key: str) -> Any:
        """Run a method of the player. A thread that is not done in time, or whose caller goes away, is lost."""
        lane = self._lanes.pop() if self._lanes else _Lane()
        future = lane.submit(lambda: getattr(self._player, method)(*args))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        except (asyncio.TimeoutError, TimeoutError):  # two classes before Python 3.11
            raise overdue(what, timeout, key) from None
        finally:
            if future.done():
                self._lanes.append(lane)
            else:
                self._busy = True
                lane.abandon()

    async def retire(self, timeout: float) -> None:
        """Close the environment, in a thread and within ``timeout``, as any of its code."""
        with contextlib.suppress(EnvironmentFailure):
            await self.call("close", (), timeout, "close", "")

    def kill(self) -> None:
        """Forget it. It is closed, unless a thread that cannot be killed is still busy with it."""
        if not self._busy:
            lane = _Lane()
            lane.submit(self._player.close)
            lane.abandon()
