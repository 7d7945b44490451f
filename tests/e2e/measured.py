"""How soon a run ends after a fault, and what is left of it then. With ``-s`` this is printed."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

from verl_turnkey.plugins.shutdown import run_files

LOG = "log.txt"


class Fault(NamedTuple):
    """What came of a fault, times in seconds after it."""

    code: int
    """exit status of the run"""
    announced: float | None
    """when it said so"""
    ended: float
    alive: list[psutil.Process]
    """of its processes"""
    held: set[Path]
    """shared memory that it held at the fault"""
    shared_memory: set[Path]
    """of that, what is still there"""


@contextmanager
def own_tmp() -> Iterator[dict[str, str]]:
    """The environment of a run whose temporary files are to be counted: few paths of sockets fit below pytest's."""
    with tempfile.TemporaryDirectory(prefix="tk-", ignore_cleanup_errors=True) as folder:
        yield {"TMPDIR": folder}


def suffered(
    what: str,
    process: subprocess.Popen,
    out: Path,
    env: dict[str, str],
    harm: Callable[[], object],
    says: str | None,
    family: list[psutil.Process] | None = None,
) -> Fault:
    """Do ``harm`` to a run and wait for its end, and that of its processes.

    ``says``: words of the run in its log, once it has noticed. ``env``: of :func:`own_tmp`. ``family``: its processes,
    where they do not descend from ``process``.
    """
    log, tmp = out / LOG, Path(env["TMPDIR"])
    family = family or psutil.Process(process.pid).children(recursive=True)
    held = {Path(path) for path in run_files._open_in([process.pid, *(child.pid for child in family)])}
    memory = {path for path in held if path.match("/dev/shm/psm_*") and path.exists()}
    before, announced = log.stat().st_size, None
    began = time.monotonic()
    harm()
    while process.poll() is None and (waited := time.monotonic() - began) < 300:
        if says and announced is None and says.encode() in log.read_bytes()[before:]:
            announced = waited
        time.sleep(0.05)
    code, ended = process.wait(timeout=1), time.monotonic() - began
    _, alive = psutil.wait_procs(family, timeout=300)  # Ray's agents look seldom whether their node is there
    gone = time.monotonic() - began
    shared = {path for path in memory if path.exists()}
    sockets = [path for path in held if path.parent == Path("/tmp") and path.exists()]
    files = [*sockets, *(path for path in tmp.iterdir() if path.name != "ray")]
    noticed = "-" if announced is None else f"{announced:.1f} s"
    print(
        f"\n{what}: said so after {noticed}, ended after {ended:.1f} s with status {code}",
        f"{len(alive)} of {len(family)} processes left, the last that went did so after {gone:.1f} s",
        f"{len(shared)} of {len(memory)} pieces of shared memory left",
        f"{len(files)} temporary files left: {', '.join(sorted({kind_of(path) for path in files})) or '-'}",
        sep="; ",
    )
    return Fault(code, announced, ended, alive, memory, shared)


def kind_of(path: Path) -> str:
    """What ``turnkey doctor --clean`` calls it; else its name."""
    for kind in run_files.KINDS:
        with contextlib.suppress(OSError):
            if kind.name.fullmatch(path.name):
                return kind.what
    return path.name
