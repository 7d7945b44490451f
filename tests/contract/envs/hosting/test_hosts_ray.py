"""Hosts as Ray actors, and the client that talks to them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from live_processes import dead_soon
from ray.exceptions import OutOfMemoryError

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.hosting import pool as hosts
from verl_turnkey.envs.hosting.pool import Episode, HostPool
from verl_turnkey.plugins.trainer.rollout_metrics import summary

FAULTY = str(Path(__file__).with_name("faulty_envs.py"))
ALONE, SAFE = "test/Faulty-v0", "test/Safe-v0"


@pytest.fixture(scope="module")
def run(ray_queue) -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(scope="module")
def pool(run) -> HostPool:
    return HostPool(2, "t", places=2, step_timeout=5.0, modules=[FAULTY])


async def failure(awaitable: Any) -> EnvironmentFailure:
    with pytest.raises(EnvironmentFailure) as caught:
        await awaitable
    assert type(caught.value) is EnvironmentFailure
    return caught.value


def load(pool: HostPool) -> int:
    return sum(host.load for host in pool._hosts)


def test_the_hosts_of_a_name_are_shared(run, pool):
    again = HostPool(2, "t", places=2, modules=[FAULTY])  # as another process would
    assert [a.actor._actor_id for a in pool._hosts] == [a.actor._actor_id for a in again._hosts]


@pytest.mark.parametrize("env_id", [SAFE, ALONE])
async def test_episodes_in_hosts(pool, env_id):
    first, second = [await pool.start(env_id, {}, seed) for seed in (1, 2)]
    assert [host.load for host in pool._hosts] == [1, 1]
    assert first.info["task"] == "seed 1"
    step = await first.step("reward 0.25")
    assert (step.observation, step.reward, step.terminated) == ("fine", 0.25, False)
    assert (await first.step("known")).observation == "[]" or env_id == SAFE
    for action, kind in (("raise", "step"), ("reward nan", "reward"), ("sleep 30", "timeout")):
        episode = await pool.start(env_id, {}, 3)
        assert (await failure(episode.step(action))).kind == kind
        assert (await failure(episode.step("more"))).kind == "closed"
    assert load(pool) == 2
    first.close()
    first.close()
    assert (await second.step("end")).terminated
    assert load(pool) == 0


async def test_the_hosts_tell_what_they_measured(pool):
    ray.get(pool.measure())
    episodes = [await pool.start(SAFE, {}, seed) for seed in (1, 2)]
    await episodes[0].step("reward 0.25")
    metrics = summary(ray.get(pool.measure()))
    assert [metrics[name] for name in ("count", "open", "resets", "steps", "lost")] == [2, 2, 2, 1, 0]
    assert 0 < metrics["step_ms/max"] < 60_000
    assert 0 < metrics["reset_ms/max"] < 60_000
    for episode in episodes:
        episode.close()


async def test_more_episodes_than_places(pool):
    async def brief(seed: int) -> None:
        (await pool.start(SAFE, {}, seed)).close()

    await asyncio.wait_for(asyncio.gather(*(brief(seed) for seed in range(9))), 60)  # room for four
    assert load(pool) == 0


@pytest.mark.parametrize("env_id", [SAFE, ALONE])
async def test_a_clone_is_an_episode(pool, env_id):
    episode = await pool.start(env_id, {}, 1)
    await episode.step("keyless a")
    clone = await episode.clone()
    assert (clone.observation, clone.info["task"], clone.info["state_key"]) == ("a", "seed 1", None)
    assert (await clone.step("keyless b")).observation == "a b"
    assert (await episode.step("keyless c")).observation == "a c"
    assert load(pool) == 2
    clone.close()
    assert (await episode.step("end")).terminated
    assert (await failure(episode.clone())).kind == "closed"
    assert load(pool) == 0


async def test_a_caller_that_goes_away_frees_the_place(pool):
    start = asyncio.create_task(pool.start(SAFE, {"on_reset": "sleep 20"}, 1))
    await asyncio.sleep(0.5)
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    assert load(pool) == 0
    for _ in range(100):
        loads = [await host.actor.load.remote() for host in pool._hosts]
        if sum(load["open"] for load in loads) == 0:
            break
        await asyncio.sleep(0.05)
    episodes = [await asyncio.wait_for(pool.start(SAFE, {}, seed), 10) for seed in range(4)]  # every place
    for episode in episodes:
        episode.close()


async def pid_of(episode: Episode) -> int:
    return int((await episode.step("pid")).observation)


@pytest.fixture
def patient(monkeypatch) -> None:
    """A host may be replaced as soon as it is born, and rests only a moment."""
    monkeypatch.setattr(hosts, "PAUSE_SECONDS", 0.5, raising=False)


async def played(pool: HostPool, number: int) -> int:
    """How many of ``number`` episodes, started together, come to their end."""

    async def episode(seed: int) -> bool:
        return (await (await pool.start(SAFE, {}, seed)).step("end")).terminated

    results = await asyncio.gather(*(episode(seed) for seed in range(number)), return_exceptions=True)
    return sum(result is True for result in results)


async def test_a_blocked_host_is_killed_and_replaced(patient):
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
    assert dead_soon(pid, seconds=30)
    assert dead_soon(child, seconds=30)
    assert await played(pool, 1) == 1
    assert load(pool) == 0


async def test_a_host_that_dies_costs_the_episodes_open_in_it(patient):
    pool = HostPool(1, "mortal", restarts=1, modules=[FAULTY])
    for _ in range(3):
        episodes = [await pool.start(SAFE, {}, seed) for seed in range(2)]
        pid = await pid_of(episodes[0])
        assert pid == await pid_of(episodes[1])
        child = await pid_of(await pool.start(ALONE, {}, 1))
        errors = await asyncio.gather(*(failure(e.step("vanish 1")) for e in episodes))
        assert {error.kind for error in errors} == {"host"}
        assert dead_soon(pid, seconds=30)
        assert dead_soon(child, seconds=30)


@pytest.mark.parametrize("victims", [1, 2])
async def test_hosts_that_are_killed_while_idle_cost_nothing(patient, victims):
    pool = HostPool(2, f"idle{victims}", modules=[FAULTY])
    for host in pool._hosts[:victims]:
        os.kill((await host.actor.load.remote())["process"], signal.SIGKILL)
    assert await played(pool, 16) == 16


async def test_an_environment_that_kills_its_host_at_its_start_fails_alone(patient):
    pool = HostPool(1, "poisoned", modules=[FAULTY])
    assert await played(pool, 1) == 1
    assert (await failure(pool.start(SAFE, {"on_reset": "vanish 1"}, 1))).kind == "host"
    assert await played(pool, 4) == 4


async def test_a_host_that_is_gone_for_good_is_replaced(patient):
    pool = HostPool(1, "victim", modules=[FAULTY])
    victim = await pool.start(SAFE, {}, 1)
    pid = await pid_of(victim)
    ray.kill(pool._hosts[0].actor, no_restart=True)
    assert dead_soon(pid, seconds=30)  # Ray kills in the background: a step that is sent at once may still be answered
    assert (await failure(victim.step("go"))).kind == "host"
    assert await played(pool, 1) == 1
    assert load(pool) == 0


async def test_a_host_that_ray_kills_for_its_memory_is_replaced(patient):
    """Its calls end with an error of another class than those of any other dead actor."""

    def killed(*_: Any) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(OutOfMemoryError("the node ran low on memory"))
        return answer

    pool = HostPool(1, "greedy", modules=[FAULTY])
    victim = await pool.start(SAFE, {}, 1)
    pool._hosts[0].call = killed
    error = await failure(victim.step("go"))
    assert (error.kind, "ran low on memory" in error.message) == ("host", True)
    assert await played(pool, 2) == 2
    assert load(pool) == 0


async def stall(pool: HostPool, number: int) -> set[str]:
    """The kinds of failure of ``number`` episodes that hang at the same time."""
    episodes = [await pool.start(SAFE, {}, seed) for seed in range(number)]
    return {(await failure(step)).kind for step in [asyncio.ensure_future(e.step("sleep 9")) for e in episodes]}


async def test_a_stall_costs_a_pause_and_no_episode_after_it(patient):
    pool = HostPool(1, "stalled", places=20, restarts=3, step_timeout=3, modules=[FAULTY])
    assert await played(pool, 15) == 15
    going_on = await pool.start(SAFE, {}, 1)
    pid = await pid_of(going_on)
    assert await stall(pool, 8) == {"timeout"}
    assert await played(pool, 15) == 15
    successor = await pool.start(SAFE, {}, 1)
    assert await pid_of(successor) != pid
    assert (await going_on.step("end")).terminated  # what is open in the old one goes on
    assert dead_soon(pid, seconds=30)
    successor.close()


async def test_a_host_that_is_over_is_left_alone(monkeypatch):
    """However little it has to do: the others take the episodes."""
    monkeypatch.setattr(hosts, "PAUSE_SECONDS", 3600.0, raising=False)
    pool = HostPool(2, "over", places=20, restarts=1, step_timeout=3, modules=[FAULTY])
    episodes = [await pool.start(SAFE, {}, seed) for seed in range(4)]
    pids = [await pid_of(episode) for episode in episodes]
    hanging = [asyncio.ensure_future(e.step("sleep 9")) for e, p in zip(episodes, pids, strict=True) if p == pids[0]]
    assert [(await failure(step)).kind for step in hanging] == ["timeout", "timeout"]
    assert await played(pool, 6) == 6
    assert load(pool) == 2


ON_NODES = """
import ray
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl_turnkey.envs.hosting.pool import HostPool

def told(_):
    return ray.get_runtime_context().get_node_id()

@ray.remote(num_cpus=0)
class Loop:
    async def hosts(self):
        here = ray.get_runtime_context().get_node_id()
        pool = HostPool(4, here)
        where = [host.actor.__ray_call__.remote(told) for host in pool._hosts]
        return [await node == here for node in where]

cluster = Cluster()
for _ in range(2):  # add_node itself would give each 30 seconds to start
    cluster.add_node(num_cpus=2, include_dashboard=False, wait=False)
    cluster.wait_for_nodes(timeout=200)
ray.init(address=cluster.address, log_to_driver=False)
for node in ray.nodes():
    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    print("here:", ray.get(Loop.options(scheduling_strategy=place).remote().hosts.remote()))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.long
def test_all_hosts_of_a_pool_are_on_its_node():
    with tempfile.TemporaryDirectory(prefix="tk-", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "ray").mkdir()
        # Ray notes the address of the cluster there, where no other run on the machine looks for one to join.
        env, command = {**os.environ, "RAY_TMPDIR": folder}, [sys.executable, "-c", ON_NODES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=env)
    lines = [line for line in done.stdout.splitlines() if line.startswith("here:")]  # Ray may say something, too
    assert lines == [f"here: {[True] * 4}"] * 2, f"{done.stdout}\n{done.stderr[-2000:]}"
