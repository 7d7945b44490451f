"""What an environment does costs its episode, and leaves nothing.

With ``-s`` the seconds until it was noticed are printed, and what is left. The client is real, and hosts are Ray
actors, as in a run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.hosting.pool import Episode, HostPool

FAULTY = str(Path(__file__).with_name("faulty_envs.py"))
DEADLINE = 5.0
CASES = {
    "raise": ("step", "Strange: strange 1"),
    "reward nan": ("reward", "nan"),
    "sleep 60": ("timeout", "turnkey.env.step_timeout"),
    "vanish 1": ("process", "ended with exit status 1"),
    "crash": ("process", "was killed by SIGSEGV"),
    "kill": ("process", "was killed by SIGKILL from outside, as the kernel does when memory runs out"),
    "eat": ("step", "MemoryError"),
    "eat abort": ("process", "was killed by SIGABRT"),
}


@pytest.fixture(scope="module")
def run(ray_queue) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    made = asyncio.new_event_loop()
    yield made.run_until_complete
    made.close()


@pytest.fixture(scope="module")
def pool(run) -> HostPool:
    return HostPool(1, "measured", places=4, step_timeout=DEADLINE, modules=[FAULTY])


async def begun(pool: HostPool) -> tuple[Episode, list[int]]:
    """An episode, its process, and one that the environment has started in a session of its own."""
    episode = await pool.start("test/Faulty-v0", {}, 1)
    return episode, [int((await episode.step(what)).observation) for what in ("pid", "start")]


def alive(pids: list[int]) -> list[int]:
    def has_a_title(pid: int) -> bool:  # a zombie has none
        try:
            return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:
            return False

    return [pid for pid in pids if has_a_title(pid)]


async def left_of(pids: list[int]) -> tuple[list[int], float]:
    """Those that are still there after half a minute; seconds until the last one went."""
    began = time.monotonic()
    while (left := alive(pids)) and time.monotonic() - began < 30:
        await asyncio.sleep(0.02)
    return left, time.monotonic() - began


async def failed(step: Any) -> tuple[EnvironmentFailure, float]:
    """The failure, and the seconds until it was there."""
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure) as caught:
        await step
    return caught.value, time.monotonic() - began


@pytest.mark.parametrize("action", CASES)
async def test_a_fault_costs_its_episode_and_names_itself(pool, action: str):
    (episode, pids), (other, _) = await begun(pool), await begun(pool)
    failure, seconds = await failed(episode.step(action))
    left, until = await left_of(pids)
    print(f"{action}: noticed after {seconds:.2f} s; {len(left)} of {len(pids)} processes left {until:.2f} s later")
    kind, words = CASES[action]
    assert failure.kind == kind
    assert words in failure.message
    assert not left
    again, fresh = await begun(pool)  # in a process of its own
    assert not {*fresh} & {*pids}
    assert (await other.step("echo it goes on")).observation == "it goes on"
    for env in (again, other):
        assert (await env.step("end")).terminated


async def test_a_host_that_is_killed_costs_its_episodes_and_is_replaced(pool):
    episode, pids = await begun(pool)
    os.kill((await pool._hosts[0].actor.load.remote())["process"], signal.SIGKILL)
    failure, seconds = await failed(episode.step("echo"))
    left, until = await left_of(pids)
    print(f"host killed: noticed after {seconds:.2f} s; {len(left)} of {len(pids)} left {until:.2f} s later")
    assert failure.kind == "host"
    assert not left
    again, _ = await begun(pool)
    assert (await again.step("end")).terminated
