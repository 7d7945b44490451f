"""When a host closes environments that it could use again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from verl_turnkey.envs.hosting import instances
from verl_turnkey.envs.hosting.host import EnvHost

CLASS = """
import os
import gymnasium

KEPT = []

class Keeper(gymnasium.Env):
    metadata = {"render_modes": [], "memory_mb": 50}
    def reset(self, *, seed=None, options=None):
        return str(os.getpid()), {}
    def step(self, action):
        KEPT.append(b"x" * int(action) * 1_000_000)
        return "", 0.0, True, False, {}

gymnasium.register("test/Keeper-v0", entry_point=Keeper)
"""
ENV = "test/Keeper-v0"


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.fixture
def modules(tmp_path: Path) -> list[str]:
    (tmp_path / "keeper.py").write_text(CLASS)
    return [str(tmp_path / "keeper.py")]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def dead_soon(pid: int) -> bool:
    end = time.monotonic() + 20
    while alive(pid) and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return not alive(pid)


def test_environments_that_nobody_needs_are_closed(modules, monkeypatch):
    monkeypatch.setattr(instances, "IDLE_SECONDS", 600.0)
    monkeypatch.setattr(instances, "LOOK_SECONDS", 0.1)

    async def main():
        host = EnvHost(modules, places=4)
        pids = [int((await host.start(name, ENV, {}, 1, 60))[0]) for name in ("a", "b")]
        await host.step("a", "0", 20)
        await host.step("b", "0", 20)
        assert (await host.load())["idle"] == 2
        host._instances.idle[0].released -= 600
        assert await dead_soon(pids[0])
        assert int((await host.start("c", ENV, {}, 1, 60))[0]) == pids[1]  # its time had not come
        await asyncio.sleep(0.5)
        assert alive(pids[1])  # in use
        await host.step("c", "0", 20)
        host._instances.idle[0].released -= 600
        assert await dead_soon(pids[1])
        assert (await host.load())["idle"] == 0
        await host.shutdown()

    run(main)


def test_what_was_idle_longest_is_closed_while_memory_is_scarce(modules, monkeypatch):
    monkeypatch.setattr(instances, "LOOK_SECONDS", 0.1)
    looks = []

    def lack() -> int:
        looks.append(0)
        return 10 if len(looks) == 1 else 0  # less than one process has; and the machine has two hosts

    async def main():
        host = EnvHost(modules, places=4, sharers=2)
        pids = [int((await host.start(name, ENV, {}, 1, 60))[0]) for name in ("a", "b", "c")]
        for name in ("b", "a", "c"):
            await host.step(name, "0", 20)
        monkeypatch.setattr(instances.capacity, "lacking_memory_mb", lack)
        assert await dead_soon(pids[1])
        while len(looks) < 3:
            await asyncio.sleep(0.02)
        assert alive(pids[0])
        assert alive(pids[2])
        assert (await host.load())["idle"] == 2
        await host.shutdown()

    run(main)


def test_a_process_that_grew_is_not_used_again(modules):
    async def main():
        host = EnvHost(modules, places=2)

        async def episode(megabytes: int) -> int:
            pid = int((await host.start("a", ENV, {}, 1, 60))[0])
            await host.step("a", str(megabytes), 20)
            return pid

        first = await episode(200)  # large from the start: that is its size
        assert await episode(100) == first
        assert await episode(500) == first  # seen at its end
        assert await dead_soon(first)
        assert await episode(0) != first
        await host.shutdown()

    run(main)


LEAKING = """
import os, resource
from pathlib import Path
import gymnasium

KEPT = []
size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (250 << 20), resource.RLIM_INFINITY))

class Leaking(gymnasium.Env):
    def reset(self, *, seed=None, options=None):
        KEPT.append(bytes(80 << 20))
        return str(os.getpid()), {}
    def step(self, action):
        return "over", 0.0, True, False, {}

gymnasium.register("test/Leaking-v0", entry_point=Leaking)
"""


def test_what_a_used_process_cannot_reset_a_new_one_can(tmp_path: Path):
    """Where the leak is too small to be seen at the end of an episode."""
    (tmp_path / "leaking.py").write_text(LEAKING)

    async def main():
        host = EnvHost([str(tmp_path / "leaking.py")], places=2)
        pids = []
        for n in range(7):
            pids.append(int((await host.start(str(n), "test/Leaking-v0", {}, 1, 60))[0]))
            await host.step(str(n), "", 20)
        assert len(set(pids)) < len(pids), "no process was used again"
        assert len(set(pids)) > 1, "no process was replaced"
        assert not alive(pids[0])
        assert (await host.measure())["lost"] == 0
        await host.shutdown()

    run(main)
