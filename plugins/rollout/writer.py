"""Writing in the background: items go through a bounded queue to a daemon thread.

While a disk is full the items written are lost; while a mount hangs those that the queue cannot hold. Neither ever
stops the caller. Lost items are counted, and the log says when a loss begins and how much was lost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Full, Queue
from typing import Generic, TypeVar

from verl_turnkey.plugins.notices import logger

Item = TypeVar("Item")


class Writer(Generic[Item]):
    """Hands each item to ``sink``, in order, in a thread of its own.

    Args:
        sink: writes one item; whatever it raises costs this item only.
        what: what the items are called in warnings.
        most: items that may wait; further ones are lost.
    """

    def __init__(self, sink: Callable[[Item], None], what: str, most: int = 256) -> None:
        self._sink, self._what = sink, what
        self._queue: Queue[Item | threading.Event] = Queue(most)
        self._lock = threading.Lock()  # of the three below
        self.lost = 0
        """items that were not written"""
        self._outage = 0  # items lost since the last one that was written
        self._thread: threading.Thread | None = None

    def put(self, item: Item) -> None:
        """Queue ``item`` for writing; never waits."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"writer of {self._what}", daemon=True)
                self._thread.start()
        try:
            self._queue.put_nowait(item)
        except Full:
            self._lose(f"writing hangs, and {self._queue.maxsize} wait")

    def drain(self, seconds: float) -> bool:
        """Wait until everything that was put is written or lost; False: it took longer than ``seconds``."""
        done = threading.Event()
        if self._thread is None:
            return True
        try:
            self._queue.put(done, timeout=seconds)
        except Full:
            return False
        return done.wait(seconds)

    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._sink(item)
            except Exception as error:  # whatever the sink raises; the next item may be written
                self._lose(f"{type(error).__name__}: {error}")
            else:
                self._resume()

    def _lose(self, reason: str) -> None:
        with self._lock:
            self.lost += 1
            self._outage += 1
            first = self._outage == 1
        if first:
            logger.warning("%s are not written until this is over: %s", self._what, reason)

    def _resume(self) -> None:
        with self._lock:
            outage, self._outage = self._outage, 0
        if outage:
            logger.warning("%s are written again; %d were lost, %d in all", self._what, outage, self.lost)
