"""How an environment's process is started, and what is said about its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.hosting.process import ProcessWorker


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 5, f"signal {signal.SIGRTMIN + 5}")]
)
def test_every_signal_that_kills_is_told(monkeypatch, tmp_path, number, name):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # a Path, as some programs put there

    async def main():
        worker = await ProcessWorker.spawn()
        os.kill(worker._process.pid, number)
        with pytest.raises(EnvironmentFailure, match=f"was killed by {name}.* during a test"):
            await worker.call("close", (), 20.0, "a test", "key")

    assert isinstance(sys.path[-1], Path)
    asyncio.run(main())


@pytest.mark.parametrize(("threads", "kept"), [(None, "1"), ("4", "4")])
def test_the_process_sees_no_device_and_nothing_of_ray(monkeypatch, threads, kept):
    """It would take memory of the GPU, or the cluster for its own; its threads would fill the machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("SOMETHING_ELSE", "stays")
    if threads is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)

    async def variables():
        worker = await ProcessWorker.spawn()
        try:
            return Path(f"/proc/{worker._process.pid}/environ").read_text().split("\0")
        finally:
            worker.kill()

    environment = dict(entry.split("=", 1) for entry in asyncio.run(variables()) if entry)
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert (environment["OMP_NUM_THREADS"], environment["SOMETHING_ELSE"]) == (kept, "stays")
    assert not [name for name in environment if name.startswith("RAY_")]


#: In a process of its own: threads of Ray in this one would find no descriptors either.
WITHOUT_DESCRIPTORS = """
import asyncio, contextlib, os, resource, sys
from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.hosting.fresh import new_mark
from verl_turnkey.envs.hosting.process import ProcessWorker

def opened():  # found without a descriptor
    found = []
    for each in range(256):
        with contextlib.suppress(OSError):
            os.fstat(each)
            found.append(each)
    return found

async def main(spare):
    new_mark()  # starts the one process that outlives the others
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = []
    with contextlib.suppress(OSError):
        while True:
            held.append(os.open(os.devnull, os.O_RDONLY))
    for _ in range(spare):
        os.close(held.pop())
    before = opened()
    try:
        await ProcessWorker.spawn()
        kind = "none"
    except EnvironmentFailure as failed:
        kind = failed.kind
    after = opened()
    for each in held:
        os.close(each)
    print(kind, "leaves", sorted(set(after) ^ set(before)))

asyncio.run(main(int(sys.argv[1])))
"""


@pytest.mark.parametrize("spare", range(6))
def test_without_a_descriptor_no_process_is_started_and_none_stays_open(spare):
    """Whichever of the descriptors that a process takes is the last."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(spare)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "process leaves []\n", done.stderr
