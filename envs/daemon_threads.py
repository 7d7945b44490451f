"""Threads for calls that may be given up."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any

Calls = SimpleQueue["tuple[Future[Any], Callable[[], Any]] | None"]


class DaemonThreads(Executor):
    """At most ``most`` threads, which end with the process, or when this object is deleted.

    With a ``ThreadPoolExecutor`` a process waits at its end for the calls that are running: up to half an hour after
    Ctrl-C.
    """

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._started = 0
        self._calls: Calls = SimpleQueue()
        weakref.finalize(self, _end, self._calls, most)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """To be called from one thread."""
        future: Future[Any] = Future()
        self._calls.put((future, partial(fn, *args, **kwargs)))
        if self._started < self._most:
            self._started += 1
            name = f"{self._name}-{self._started}"
            threading.Thread(target=_run, args=(self._calls,), name=name, daemon=True).start()
        return future


def _run(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        settle(*call)
        del call  # what waits for the next one holds nothing


def settle(future: Future[Any], call: Callable[[], Any]) -> None:
    """Run ``call`` for ``future``, unless nobody waits for it any more."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


def _end(calls: Calls, threads: int) -> None:
    for _ in range(threads):
        calls.put(None)
