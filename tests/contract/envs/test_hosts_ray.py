"""Hosts as Ray actors, and the client that talks to them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from verl_turnkey.envs import EnvironmentFailure, hosts
from verl_turnkey.envs.hosts import Episode, HostPool

FAULTY = str(Path(__file__).parents[2] / "unit" / "envs" / "faulty_envs.py")
ALONE, SAFE = "test/Faulty-v0", "test/Safe-v0"


@pytest.fixture(scope="module")
def run(ray_queue) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(scope="module")
def pool(run) -> HostPool:
    return HostPool(2, "t", places=2, step_timeout=1.0, modules=[FAULTY])


async def failure(awaitable: Any) -> EnvironmentFailure:
    with pytest.raises(EnvironmentFailure) as caught:
        await awaitable
    assert type(caught.value) is EnvironmentFailure
    return caught.value


def gone(pid: int) -> bool:
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
        time.sleep(0.05)
    return not Path(f"/proc/{pid}").exists()


def test_the_hosts_of_a_name_are_shared(run, pool):
    twin = HostPool(2, "t", places=2, modules=[FAULTY])  # as another process would
    assert [a._actor_id for a in pool._hosts] == [a._actor_id for a in twin._hosts]


@pytest.mark.parametrize("env_id", [SAFE, ALONE])
def test_episodes_in_hosts(run, pool, env_id):
    async def main():
        first, second = [await pool.start(env_id, {}, seed) for seed in (1, 2)]
        assert sorted(pool._loads) == [1, 1]
        assert first.info["task"] == "seed 1"
        step = await first.step("reward 0.25")
        assert (step.observation, step.reward, step.terminated) == ("fine", 0.25, False)
        assert (await first.step("known")).observation == "[]" or env_id == SAFE
        for action, kind in (("raise", "step"), ("reward nan", "reward"), ("sleep 30", "timeout")):
            episode = await pool.start(env_id, {}, 3)
            assert (await failure(episode.step(action))).kind == kind
            assert (await failure(episode.step("more"))).kind == "closed"
        assert sum(pool._loads) == 2
        first.close()
        first.close()
        assert (await second.step("end")).terminated
        assert sum(pool._loads) == 0

    run(main())


def test_more_episodes_than_places(run, pool):
    async def brief(seed: int) -> None:
        (await pool.start(SAFE, {}, seed)).close()

    async def main():
        await asyncio.wait_for(asyncio.gather(*(brief(seed) for seed in range(9))), 60)  # room for four
        assert sum(pool._loads) == 0

    run(main())


@pytest.mark.parametrize("env_id", [SAFE, ALONE])
def test_a_clone_is_an_episode(run, pool, env_id):
    async def main():
        episode = await pool.start(env_id, {}, 1)
        await episode.step("keyless a")
        clone = await episode.clone()
        assert (clone.observation, clone.info["task"], clone.info["state_key"]) == ("a", "seed 1", None)
        assert (await clone.step("keyless b")).observation == "a b"
        assert (await episode.step("keyless c")).observation == "a c"
        assert sum(pool._loads) == 2
        clone.close()
        assert (await episode.step("end")).terminated
        assert (await failure(episode.clone())).kind == "closed"
        assert sum(pool._loads) == 0

    run(main())


def test_a_caller_that_goes_away_frees_the_place(run, pool):
    async def main():
        start = asyncio.create_task(pool.start(SAFE, {"on_reset": "sleep 20"}, 1))
        await asyncio.sleep(0.5)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        assert sum(pool._loads) == 0
        for _ in range(100):
            loads = [await host.load.remote() for host in pool._hosts]
            if sum(load["open"] for load in loads) == 0:
                break
            await asyncio.sleep(0.05)
        episodes = [await asyncio.wait_for(pool.start(SAFE, {}, seed), 10) for seed in range(4)]  # every place
        for episode in episodes:
            episode.close()

    run(main())


async def pid_of(episode: Episode) -> int:
    return int((await episode.step("pid")).observation)


def test_a_blocked_host_is_killed_and_comes_back(run):
    async def main():
        pool = HostPool(1, "frozen", modules=[FAULTY])
        child = await pid_of(await pool.start(ALONE, {}, 1))
        frozen, other = [await pool.start(SAFE, {}, 1) for _ in range(2)]
        pid = await pid_of(other)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hosts, "LIVENESS_SECONDS", 0.5)
            error = await failure(frozen.step("freeze"))  # the whole process: no deadline inside it can run out
        assert error.kind == "host"
        assert "blocked" in error.message
        assert (await failure(other.step("go"))).kind == "host"
        assert gone(pid)
        assert gone(child)
        again = await pool.start(SAFE, {}, 1)
        assert (await again.step("end")).terminated
        assert pool._lives == [1]
        assert pool._loads == [1]  # the first one, that nobody asked any more

    run(main())


def test_a_host_that_dies_costs_its_episodes(run):
    async def main():
        pool = HostPool(1, "mortal", restarts=1, modules=[FAULTY])
        for _ in range(2):
            episodes = [await pool.start(SAFE, {}, seed) for seed in range(2)]
            pid = await pid_of(episodes[0])
            assert pid == await pid_of(episodes[1])
            child = await pid_of(await pool.start(ALONE, {}, 1))
            errors = await asyncio.gather(*(failure(e.step("vanish 1")) for e in episodes))
            assert gone(pid)
            assert gone(child)
        assert "restarts" in {error.kind for error in errors}
        error = await failure(pool.start(SAFE, {}, 1))
        assert error.kind == "restarts"
        assert "environment hosts" in error.message

    run(main())


def test_a_host_that_is_gone_for_good(run):
    async def main():
        pool = HostPool(1, "victim", modules=[FAULTY])
        victim = await pool.start(SAFE, {}, 1)
        ray.kill(pool._hosts[0], no_restart=True)
        assert (await failure(victim.step("go"))).kind == "host"
        assert (await failure(pool.start(SAFE, {}, 1))).kind == "host"
        assert pool._loads == [0]

    run(main())
