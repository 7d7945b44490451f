"""Where a job of ``turnkey env-check`` is done: here, or in a process of its own. Both ends of the pipe are here."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from verl_turnkey.envs import errors
from verl_turnkey.envs.checking.observations import Limits, Record
from verl_turnkey.envs.checking.play import USER_ERRORS, Job, examine
from verl_turnkey.envs.checking.traces import Trace

_GRACE_SECONDS = 3.0  # what a process may spend between two calls before it counts as lost
_OTHER_SECONDS = 600.0  # stages of many calls: gymnasium's checker, threads
_ENTRY = f"from {__name__} import main; main()"


def play_here(job: Job, record: Record) -> None:
    """Run ``job`` in this process, without protection from an environment that hangs or dies."""

    def tell(*message: Any) -> None:
        if message[0] == "set":
            setattr(record, *message[1:])

    with contextlib.redirect_stdout(io.StringIO()) as out:
        examine(job, tell, out.getvalue)


def play_apart(job: Job, record: Record, limits: Limits, hash_seed: int) -> list[tuple[str, str]]:
    """Run ``job`` in a new process, which fills ``record``. Returns the properties that it failed on, with evidence."""
    seconds_of = {"make": limits.reset, "reset": limits.reset, "step": limits.step, "close": limits.reset}
    ours, theirs = Pipe()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-c", _ENTRY, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,  # so that what the environment has started ends with it
        )
        theirs.close()
        kind, what = "other", "starting"
        try:
            ours.send((sys.path, job))
            stopped: list[tuple[str, str]] = []
            while True:
                allowed = seconds_of.get(kind, _OTHER_SECONDS)
                if not ours.poll(allowed + _GRACE_SECONDS):
                    key = "step" if kind == "step" else "reset"
                    advice = f"; raise turnkey.env.{key}_timeout if that is normal" if kind in seconds_of else ""
                    return [("deadline", f"{what} took longer than {allowed:g} s{advice}")]
                message = ours.recv()
                if message[0] == "call":
                    kind, what = message[1:]
                elif message[0] == "set":
                    setattr(record, *message[1:])
                elif message[0] == "elsewhere":
                    clone = Record()
                    faults = play_apart(replace(job, replays=message[1]), clone, limits, hash_seed)
                    stopped += [
                        ("clone", f"in another process: {evidence}") for _, evidence in (*faults, *clone.faults)
                    ]
                    ours.send(clone.first)
                elif message[0] == "refused":
                    raise getattr(errors, message[1])(message[2])
                elif message[0] == "bug":
                    raise RuntimeError(f"the check itself broke down, please report this:\n{message[1]}")
                else:
                    return stopped
        except (EOFError, BrokenPipeError, ConnectionResetError):
            code = process.wait()
            err.seek(0, io.SEEK_END)
            err.seek(max(0, err.tell() - 300))
            last = " ".join(err.read().decode(errors="replace").split())
            died = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
            return [("runs", f"the process died ({died}) in {what}" + (f"; its last words: {last}" if last else ""))]
        finally:
            ours.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    """The new process: a job comes over the pipe ``sys.argv[1]``, messages go back."""
    pipe = Connection(int(sys.argv[1]))
    path, job = pipe.recv()
    sys.path[:] = path

    def tell(*message: Any) -> None:
        pipe.send(message)

    def printed() -> str:
        sys.stdout.flush()
        return os.pread(1, 10_000, 0).decode(errors="replace")

    def other(traces: Sequence[Trace]) -> list[Trace]:
        tell("elsewhere", tuple(traces))
        return pipe.recv()

    try:
        examine(job, tell, printed, other)
    except USER_ERRORS as error:
        tell("refused", type(error).__name__, str(error))
    except Exception:
        tell("bug", traceback.format_exc())
    tell("done")
    os._exit(0)  # threads that an environment left behind must not keep it
