"""The processes of environments: an interpreter started afresh, or a copy of the host's template.

To start an interpreter and import gymnasium takes a third of a second of CPU and some 40 MB. The template, a process
that has imported what every environment needs, does it once; a copy is a fork, which takes milliseconds and shares that
memory. The template itself is started afresh, without Ray, CUDA or threads, and runs no code of an environment or a
user, so a copy holds no more than a process started afresh.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import itertools
import json
import os
import pickle
import random
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from verl_turnkey.envs import process_tree, user_modules
from verl_turnkey.envs.hosting import runner

BOOT_SECONDS = 120.0  # to start an interpreter and import gymnasium on a busy machine
EXIT_SECONDS = 1.0
_BOOT = """
import json, sys
fd, modules, sys.path[:] = json.loads(sys.argv[1])
sys.argv = ["turnkey-environment"]
from {0} import main
main(fd, modules)
"""
_numbers = itertools.count()


_owner = functools.cache(process_tree.start_reaper)
"""the mark of what the reaper of this process kills; the first call starts the reaper"""


class Fresh:
    """A process that this one has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid, self._process = process.pid, process

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)  # not reaped yet, so the id is still this group's

    def reap(self) -> int:
        """Wait until it has ended. Its exit status, or the number of the signal that ended it, negative."""
        return self._process.wait()

    async def status(self) -> int | None:
        """As of a :class:`Copy`; does not reap it."""
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        for _ in range(round(EXIT_SECONDS / 0.02)):
            with contextlib.suppress(ChildProcessError):
                if (exited := os.waitid(os.P_PID, self.pid, flags)) is not None:
                    return exited.si_status if exited.si_code == os.CLD_EXITED else -exited.si_status
            await asyncio.sleep(0.02)
        return None


def start(
    module: str,
    mark: str,
    connection: int,
    modules: Sequence[str],
    output: int,
    errors: int | None = None,
    **variables: str,
) -> Fresh:
    """Start ``main`` of ``module`` in an interpreter of its own. Raises OSError.

    Args:
        module: its ``main`` gets ``connection``, a descriptor, and ``modules``.
        errors: for its standard error; None: ``output``.
        variables: further environment variables.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    variables = {"OMP_NUM_THREADS": "1"} | inherited | {process_tree.MARK: mark, "CUDA_VISIBLE_DEVICES": ""} | variables
    paths = [str(path) for path in sys.path]  # some programs put Path objects there
    argument = json.dumps([connection, list(modules), paths])
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", _BOOT.format(module), argument],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output if errors is None else errors,
        env=variables,
        pass_fds=(connection,),
        start_new_session=True,
    )
    return Fresh(process)


def new_mark() -> str:
    """By which the reaper finds a process and all that it starts."""
    return f"{_owner()}.{next(_numbers):09d}."  # all of one length


MOST_BYTES = 1 << 16  # of a message; each has its own bounds on a socket of this type
Request = tuple[str, str | int]
"""``copy`` and the mark of the new process, or ``status`` and the id of one that has ended"""


class Copy:
    """A process that is a copy of the template, as its host sees it: the template is its parent."""

    def __init__(self, template: Template, pid: int) -> None:
        self.pid = pid
        self._template = template
        self._handle = os.pidfd_open(pid)  # names the process even when its id is used again

    def signal(self, number: int) -> None:
        """Raises OSError if it has ended."""
        signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """Kill it and its process group, unless it has ended: then its id may be another's."""
        if not self._has_ended(0):
            os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """Wait until it has ended, in a thread."""
        self._has_ended(None)
        os.close(self._handle)

    def _has_ended(self, wait: float | None) -> bool:
        poll = select.poll()  # select() takes no number above 1,023
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(wait))

    async def status(self) -> int | None:
        """Its exit status, or the number of the signal that ended it, negative; None if neither is known."""
        for _ in range(round(EXIT_SECONDS / 0.02)):
            try:
                status = await self._template.ask("status", self.pid)
            except OSError:
                return None
            if status is not None:
                return status
            await asyncio.sleep(0.02)
        return None


class Template:
    """The host's end. ``connection``: to a process that runs :func:`main`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._lock = asyncio.Lock()

    async def ready(self) -> None:
        """Wait until it can be copied. Raises OSError."""
        await self._answer()

    async def _answer(self) -> int | None:
        data = await asyncio.get_running_loop().sock_recv(self._connection, MOST_BYTES)
        if not data:
            raise ConnectionError("the template has ended")
        answer: int | None = pickle.loads(data)
        return answer

    async def ask(self, what: str, about: str | int, *fds: int) -> int | None:
        """The answer to a request, with which ``fds`` are sent. Raises OSError when the template is gone."""
        # A caller may be cancelled: the answer is read all the same, and duplicates of its descriptors are sent.
        asking = asyncio.ensure_future(self._ask((what, about), [os.dup(fd) for fd in fds]))
        asking.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(asking)

    async def _ask(self, request: Request, fds: list[int]) -> int | None:
        try:
            async with self._lock:
                socket.send_fds(self._connection, [pickle.dumps(request)], fds)
                return await self._answer()
        finally:
            for fd in fds:
                os.close(fd)

    async def copy(self, mark: str, connection: int, output: int) -> Copy | None:
        """A copy that serves the socket ``connection`` and prints to ``output``.

        None: there is no memory for it, or there are too many processes. Raises OSError when the template is gone.
        """
        pid = await self.ask("copy", mark, connection, output)
        return None if pid is None else Copy(self, pid)

    async def close(self) -> None:
        """End the process; copies go on."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # who waits for an answer gets none
        async with self._lock:
            self._connection.close()


class Templates:
    """The template of a host, started when it is first needed and again when it has died."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._started: tuple[Fresh, Template] | None = None
        self._lock = asyncio.Lock()

    async def copy(self, mark: str, connection: socket.socket, output: int) -> Copy | None:
        """A process that serves ``connection``; None if no template can be started."""
        try:
            async with self._lock:
                template = self._started[1] if self._started else await self._start()
            return await template.copy(mark, connection.fileno(), output)
        except (asyncio.TimeoutError, OSError):  # before Python 3.11 a TimeoutError of asyncio is not an OSError
            await self.close()
            return None

    async def _start(self) -> Template:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = start(__name__, new_mark(), theirs.fileno(), self._modules, subprocess.DEVNULL)
        template = Template(ours)
        try:
            await asyncio.wait_for(template.ready(), BOOT_SECONDS)
        except BaseException:  # cancellation included
            await template.close()
            process.kill()
            process.reap()
            raise
        self._started = process, template
        return template

    async def close(self) -> None:
        """End the template; what was copied from it goes on."""
        if self._started is not None:
            (process, template), self._started = self._started, None
            await template.close()
            with contextlib.suppress(OSError):
                process.kill()
            await asyncio.get_running_loop().run_in_executor(None, process.reap)


def main(fd: int, modules: list[str]) -> None:
    """Make copies, as the socket ``fd`` asks for them; each goes on in :func:`runner.main`."""
    control = socket.socket(fileno=fd)
    ended: dict[int, int] = {}

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (child := os.waitpid(-1, os.WNOHANG))[0]:
                ended[child[0]] = os.waitstatus_to_exitcode(child[1])

    signal.signal(signal.SIGCHLD, reap)
    os.set_inheritable(fd, False)
    user_modules.entries()  # read once for all copies
    gc.collect()
    gc.freeze()  # else the first collection in a copy would write to what it shares
    control.send(pickle.dumps(None))  # ready
    while True:
        data, fds, *_ = socket.recv_fds(control, MOST_BYTES, 2)
        if not data:
            os._exit(0)  # the host is gone, or needs no more copies
        what, about = pickle.loads(data)
        answer: int | None = None
        if what == "status":
            answer = ended.pop(about, None)
        else:
            with contextlib.suppress(OSError):  # no memory, or too many processes
                answer = os.fork()
            if answer == 0:
                control.close()
                _become(about, fds[1])
                runner.main(fds[0], modules)
            for copied in fds:
                os.close(copied)
        control.send(pickle.dumps(answer))


def _become(mark: str, output: int) -> None:
    """Set up a copy like a process that was started for an environment."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    old, os.environ[process_tree.MARK] = os.environ[process_tree.MARK], mark
    with contextlib.suppress(OSError, ValueError):
        _show(old, mark)
    random.seed()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


def _show(old: str, mark: str) -> None:
    """Write the mark, of the same length, where ``/proc/PID/environ`` shows it: a fork has that of its parent.

    Needed for processes that the environment forks without exec: they inherit this memory, and are found by it.
    """
    with open("/proc/self/stat", encoding="ascii") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # fields 50 and 51 of proc_pid_stat(5)
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        place = memory.read(end - start).index(f"{process_tree.MARK}={old}\0".encode())
        memory.seek(start + place)
        memory.write(f"{process_tree.MARK}={mark}".encode())
