"""Where environments live: in threads of the host that can be abandoned, or in a process each, watched and killed.

Thread-safe environments share the host's process. Any other one has a process that inherits neither Ray nor CUDA nor
threads, leads a session of its own and has no stdin. What it and its descendants print goes into a ring buffer, whose
end is shown on a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import queue
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from verl_turnkey.envs import process_tree
from verl_turnkey.envs.daemon_threads import settle
from verl_turnkey.envs.errors import EnvironmentFailure
from verl_turnkey.envs.hosting import runner
from verl_turnkey.envs.hosting.processes import BOOT_SECONDS, Copy, Fresh, Templates, new_mark, start
from verl_turnkey.envs.hosting.runner import DUMP_SIGNAL, HEADER_BYTES, EnvRunner, frame


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


_DUMP_SECONDS = 0.5  # on a busy machine the process may not run at once
_TAIL_CHARS = 2000


class ProcessWorker:
    """A process with one ``EnvRunner`` in it. Make it with ``spawn``."""

    def __init__(self, process: Fresh | Copy, mark: str, output: int) -> None:
        self._process = process
        self._mark = mark
        self._output = process_tree.OutputEnd(output)
        self._alive = True
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def spawn(cls, modules: Sequence[str] = (), templates: Templates | None = None) -> ProcessWorker:
        """Start a process and wait until it is ready for requests.

        ``templates``: where it is copied from; None, or where there is none: it is started afresh.

        Raises:
            EnvironmentFailure: of kind ``process``: it cannot be started, or dies or hangs before it is ready.
        """
        process: Fresh | Copy | None = None
        with contextlib.ExitStack() as its_ends, contextlib.ExitStack() as our_ends:
            try:
                mark = new_mark()
                ours, theirs = socket.socketpair()
                our_ends.enter_context(ours)
                its_ends.enter_context(theirs)
                output, their_output = os.pipe()
                our_ends.callback(os.close, output)
                its_ends.callback(os.close, their_output)
                if templates is not None:
                    process = await templates.copy(mark, theirs, their_output)
                process = process or start(runner.__name__, mark, theirs.fileno(), modules, their_output)
            except OSError as error:  # no descriptors are left, or no process
                message = f"no process could be started for an environment: {error}"
                raise EnvironmentFailure("process", message) from None
            our_ends.pop_all()
        worker = cls(process, mark, output)
        try:
            ours.setblocking(False)
            worker._reader, worker._writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 20)
            await asyncio.wait_for(worker._answer(), BOOT_SECONDS)
        except (asyncio.TimeoutError, TimeoutError):  # before OSError: since Python 3.11 it is one
            tail = worker._tail()
            worker.kill()
            message = f"an environment process was not ready after {BOOT_SECONDS:g} s{tail}"
            raise EnvironmentFailure("process", message) from None
        except (asyncio.IncompleteReadError, OSError):
            raise await worker._died("its start") from None
        except BaseException:
            worker.kill()
            raise
        return worker

    def resident_mb(self) -> float:
        """Memory of the process, without those that it has started; 0 if unknown."""
        try:
            pages = int(Path(f"/proc/{self._process.pid}/statm").read_text(encoding="ascii").split()[1])
        except (OSError, IndexError):
            return 0.0
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    async def call(self, method: str, args: tuple[Any, ...], timeout: float, what: str, key: str) -> Any:
        """Run a method of the runner. The process is killed at the deadline, or when the caller is cancelled."""
        if method == "start":
            self._output.clear()  # of what the previous episode printed
        try:
            failure, result = await asyncio.wait_for(self._exchange(method, args), timeout)
        except (asyncio.TimeoutError, TimeoutError):
            with contextlib.suppress(OSError):
                self._process.signal(DUMP_SIGNAL)  # faulthandler prints its stacks
            await asyncio.sleep(_DUMP_SECONDS)
            tail = self._tail()
            self.kill()
            raise deadline_exceeded(what, timeout, key, tail) from None
        except (asyncio.IncompleteReadError, OSError):
            raise await self._died(what) from None
        except EnvironmentFailure:
            raise
        except BaseException:
            self.kill()
            raise
        if failure is not None:
            raise EnvironmentFailure(failure[0], failure[1] + self._tail())
        return result

    async def retire(self, timeout: float) -> None:
        """Close the environment and let the process exit by itself within ``timeout``; then kill it."""
        with contextlib.suppress(Exception):
            await asyncio.wait_for(self._end(), timeout)
        self.kill()

    def kill(self) -> None:
        """Kill the process and all that it has started. A second call does nothing."""
        if not self._alive:
            return
        self._alive = False
        self._output.close()
        if hasattr(self, "_writer"):
            self._writer.transport.abort()
        with contextlib.suppress(OSError):
            self._process.kill()
        asyncio.get_running_loop().run_in_executor(None, self._reap)

    def _reap(self) -> None:
        self._process.reap()
        process_tree.sweep(self._mark)

    async def _end(self) -> None:
        await self._exchange("close", ())
        await self._reader.read()  # until it has exited

    async def _exchange(self, method: str, args: tuple[Any, ...]) -> Any:
        try:
            request = frame((method, args))
        except Exception as error:
            raise EnvironmentFailure("reset", f"arguments that cannot be sent to a process: {error!r}") from None
        self._writer.write(request)
        await self._writer.drain()
        return await self._answer()

    async def _answer(self) -> Any:
        size = int.from_bytes(await self._reader.readexactly(HEADER_BYTES), "big")
        data = await self._reader.readexactly(size)
        try:
            return pickle.loads(data)
        except Exception:  # the environment wrote to the connection
            raise ConnectionError from None

    async def _died(self, what: str) -> EnvironmentFailure:
        """The failure that says how the process ended and what it printed last."""
        status = await self._process.status()
        if status is None:
            how = "closed its connection to the host"
        elif status >= 0:
            how = f"ended with exit status {status}"
        else:
            how = f"was killed by {_signal_name(-status)}"
            if status == -signal.SIGKILL:
                how += " from outside, as the kernel does when memory runs out,"
        tail = self._tail()
        self.kill()
        return EnvironmentFailure("process", f"the environment's process {how} during {what}{tail}")

    def _tail(self) -> str:
        self._output.collect()
        text = self._output.text.strip()
        return f"\nIts last output:\n{text[-_TAIL_CHARS:]}" if text else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"
