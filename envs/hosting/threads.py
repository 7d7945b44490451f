"""Thread-safe environments: many in the host's process, called in threads that can be abandoned."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from verl_turnkey.envs.daemon_threads import settle
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting.runner import EnvRunner


def deadline_exceeded(what: str, timeout: float, key: str, more: str = "") -> EnvironmentFailure:
    """The failure of a call that exceeded its deadline, which the configuration key ``key`` sets."""
    return EnvironmentFailure("timeout", f"{what} took longer than {timeout:g} s; raise {key} if that is normal{more}")


class _WorkerThread:
    """A thread that runs calls one after another. It is abandoned, not joined, when a call hangs.

    Raises:
        EnvironmentFailure: of kind ``process``: it cannot be started.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        try:
            threading.Thread(target=self._run, name="turnkey-env", daemon=True).start()
        except RuntimeError as error:  # as many as the machine or the container allows
            message = f"no thread could be started for an environment: {error}"
            raise EnvironmentFailure("process", message) from None

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return future

    def abandon(self) -> None:
        """Let the thread end as soon as its pending calls return, if ever."""
        self._calls.put(None)

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            settle(*item)


class ThreadWorker:
    """Runs the calls of one environment in threads of the host's process.

    Args:
        idle_threads: shared by all thread workers of a host; a call takes one or starts one.
    """

    def __init__(self, idle_threads: list[_WorkerThread], runner: EnvRunner) -> None:
        self._idle_threads = idle_threads
        self._runner = runner
        self._busy = False

    async def call(self, method: str, args: tuple[Any, ...], timeout: float, what: str, key: str) -> Any:
        """Run a method of the runner. A thread that misses its deadline, or whose caller is cancelled, is abandoned.

        It closes the environment when its call returns, if ever.
        """
        thread = self._idle_threads.pop() if self._idle_threads else _WorkerThread()
        future = thread.submit(lambda: getattr(self._runner, method)(*args))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout)
        except (asyncio.TimeoutError, TimeoutError):  # two classes before Python 3.11
            raise deadline_exceeded(what, timeout, key) from None
        finally:
            if future.done():
                self._idle_threads.append(thread)
            else:
                self._busy = True
                if method != "close":
                    thread.submit(self._runner.close)
                thread.abandon()

    async def retire(self, timeout: float) -> None:
        """Close the environment in a thread, within ``timeout``."""
        with contextlib.suppress(EnvironmentFailure):
            await self.call("close", (), timeout, "close", "")

    def kill(self) -> None:
        """Close the environment without waiting; not if an abandoned thread will close it, or no thread is left."""
        if self._busy:
            return
        with contextlib.suppress(EnvironmentFailure):
            thread = _WorkerThread()
            thread.submit(self._runner.close)
            thread.abandon()
