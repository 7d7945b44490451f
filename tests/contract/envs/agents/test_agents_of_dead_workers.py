"""Nothing of an agent outlives the worker that plays it; Ray kills a worker's children, and so the guard."""

from __future__ import annotations

import os
import time
from pathlib import Path

import ray

SECONDS = 60


@ray.remote(num_cpus=0)
class Worker:
    async def play(self, word: str) -> None:
        from verl_turnkey.envs.agents import processes
        from verl_turnkey.envs.agents.base import AgentHandle
        from verl_turnkey.envs.agents.command import CommandRunner

        processes._END_SECONDS = 1.0
        handle = AgentHandle("http://127.0.0.1:1/none/v1", "none", "none")
        await CommandRunner(["sh", "-c", f"setsid sleep {word} & sleep {word}"], timeout=600).run({}, handle)


def sleeping(word: str) -> list[int]:
    """The processes of ``sleep word``."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        pids += [int(folder.name)] if command == f"sleep\0{word}\0".encode() else []
    return pids


def within(seconds: float, number: int, word: str) -> bool:
    end = time.monotonic() + seconds
    while len(sleeping(word)) != number and time.monotonic() < end:
        time.sleep(0.1)
    return len(sleeping(word)) == number


def test_an_agent_ends_with_its_worker(ray_queue) -> None:
    worker, word = Worker.remote(), f"86{os.getpid()}"
    worker.play.remote(word)
    assert within(SECONDS, 2, word)
    ray.kill(worker)
    assert within(SECONDS, 0, word)
