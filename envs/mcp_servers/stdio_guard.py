"""The guard of a stdio server: a script between it and its client, which bounds its output and ends all its processes.

Whatever the server starts stays below the guard, and is killed when the server ends or when the client closes its side
or ends. A server that writes more bytes than allowed before it gets its next message is killed. Standard library only.

Arguments: the bytes that the server may write, and its command.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "agents"))
guard = importlib.import_module("guard")  # of agents, whose folder is not a package to a script

CHUNK = 1 << 16
GRACE_SECONDS = 1.0  # less than the client waits
ERRORS_BYTES = 4096
"""kept of the server's standard error: its end"""
_SET_CHILD_SUBREAPER = 36  # prctl(2)


def main(most_bytes: int, command: list[str]) -> int:
    """Run the server. Its exit status, as a shell gives it."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    errors = bytearray()
    try:
        _pass_on(process, most_bytes, errors)
    finally:
        process.poll()
        guard.kill_descendants()
        with contextlib.suppress(OSError):
            os.write(2, bytes(errors[-ERRORS_BYTES:]))
    status = process.returncode
    return 137 if status is None else status if status >= 0 else 128 - status


def _pass_on(process: subprocess.Popen[bytes], most_bytes: int, errors: bytearray) -> None:
    """Pass messages both ways until the server ends, or a second after the client wants the end."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    to_server, from_server, of_errors = process.stdin.fileno(), process.stdout.fileno(), process.stderr.fileno()
    os.set_blocking(to_server, False)
    ended = os.pidfd_open(process.pid)
    waiting, written, deadline = bytearray(), 0, float("inf")
    poll = select.poll()
    for descriptor in (from_server, of_errors, ended):
        poll.register(descriptor, select.POLLIN)
    poll.register(0, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        ready = dict(poll.poll(None if deadline == float("inf") else left * 1000))
        if 0 in ready:
            # A server that does not read keeps its client waiting, but the client can still close its side.
            chunk = b"" if not ready[0] & select.POLLIN else os.read(0, CHUNK)
            waiting += chunk
            written = 0
            if not chunk:
                poll.unregister(0)
                deadline = time.monotonic() + GRACE_SECONDS
            elif len(waiting) > most_bytes:
                poll.modify(0, 0)
            if waiting:
                poll.register(to_server, select.POLLOUT)
        if to_server in ready:
            try:
                del waiting[: os.write(to_server, waiting[:CHUNK])]
            except BlockingIOError:
                pass
            except OSError:  # it no longer reads
                waiting.clear()
            if not waiting:
                poll.unregister(to_server)
                if deadline == float("inf"):
                    poll.modify(0, select.POLLIN)
        if not waiting and deadline < float("inf") and not process.stdin.closed:
            process.stdin.close()  # a server ends by itself then
        if from_server in ready:
            chunk = os.read(from_server, CHUNK)
            written += len(chunk)
            if not chunk:
                poll.unregister(from_server)
            elif written > most_bytes:
                errors += f"\nit wrote more than {most_bytes} bytes without a message from its client\n".encode()
                return
            elif not _write(chunk):
                return
        if of_errors in ready:
            chunk = os.read(of_errors, CHUNK)
            errors += chunk
            del errors[:-ERRORS_BYTES]
            if not chunk:
                poll.unregister(of_errors)
        if ended in ready and not {from_server, of_errors} & ready.keys():
            process.wait()
            return


def _write(data: bytes) -> bool:
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError:  # the client is gone
        return False
    return True


if __name__ == "__main__":
    exit_status = main(int(sys.argv[1]), sys.argv[2:])
    sys.stderr.flush()
    os._exit(exit_status)
