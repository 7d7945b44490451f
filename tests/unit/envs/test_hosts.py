"""Hosts: whatever an environment does ends one episode and nothing else."""

from __future__ import annotations

import asyncio
import pickle
import re
import sys
import tempfile
import time
from pathlib import Path

import pytest
import ray

from verl_turnkey.envs import EnvironmentFailure, hosts
from verl_turnkey.envs.hosts import EnvHost, HostPool
from verl_turnkey.envs.modules import import_modules

FAULTY = str(Path(__file__).parent / "faulty_envs.py")
CUSTOM = str(Path(__file__).parents[3] / "examples" / "custom_env.py")
ID = "test/Faulty-v0"
import_modules([FAULTY])
faulty = next(module for name, module in sys.modules.items() if name.startswith("turnkey_user_faulty_envs"))


async def failure(awaitable) -> EnvironmentFailure:
    with pytest.raises(EnvironmentFailure) as caught:
        await awaitable
    return caught.value


def test_an_episode_from_start_to_end():
    async def main():
        host = EnvHost()
        episode, observation, info = await host.start(ID, {}, 4, 5)
        assert observation == "fine"
        assert info == {"state_key": "(4, 0)", "admissible": None, "won": None, "invalid": False, "task": "seed 4"}
        answer = await host.step(episode, "reward 0.5", 5)
        assert answer[:4] == ("fine", 0.5, False, False)
        assert answer[4]["state_key"] == 1
        assert (await host.step(episode, "end", 5))[2:4] == (True, False)
        over = await failure(host.step(episode, "more", 5))
        assert over.kind == "closed"
        await host.close(episode)
        await host.close(episode)
        assert await host.load() == {"open": 0, "idle": 1, "max_instances": 64}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("action", "kind", "words"),
    [
        ("raise", "step", r"Strange: strange 1\n(.|\n)*_do"),
        ("exit", "step", "SystemExit: 3"),
        ("observe", "step", "observation must be text, not int 5"),
        ("reward nan", "reward", "must be finite, not nan"),
        ("reward -inf", "reward", "must be finite, not -inf"),
        ("text_reward", "reward", "must be a number, not str 'much'"),
        ("sleep 30", "timeout", r"longer than 0\.2 s; raise turnkey\.env\.step_timeout"),
    ],
)
def test_a_bad_step_ends_its_episode_and_no_other(action, kind, words):
    async def main():
        host = EnvHost(max_instances=2)
        bad, good = [(await host.start(ID, {}, seed, 5))[0] for seed in (1, 2)]
        error = await failure(host.step(bad, action, 0.2))
        assert error.kind == kind
        assert re.search(words, error.message)
        assert (await host.step(good, "go", 5))[0] == "fine"
        assert (await failure(host.step(bad, "go", 5))).kind == "closed"
        await asyncio.wait_for(host.start(ID, {}, 3, 5), 2)  # the failed episode's place is free, its environment gone
        assert await host.load() == {"open": 2, "idle": 0, "max_instances": 2}
        copy = pickle.loads(pickle.dumps(error))
        assert (copy.kind, copy.message) == (error.kind, error.message)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("env_id", "kwargs", "kind", "words"),
    [
        (ID, {"on_reset": "raise"}, "reset", "Strange: strange 1"),
        (ID, {"on_reset": "observe"}, "reset", "observation must be text"),
        (ID, {"on_reset": "sleep 30"}, "timeout", "reset_timeout"),
        (ID, {"on_rest": "ok"}, "reset", "Did you mean 'on_reset'"),
        ("test/Fauly-v0", {}, "reset", "Did you mean 'test/Faulty-v0'"),
    ],
)
def test_a_bad_start_frees_its_place(env_id, kwargs, kind, words):
    async def main():
        host = EnvHost(max_instances=1)
        error = await failure(host.start(env_id, kwargs, 0, 0.2))
        assert error.kind == kind
        assert words in error.message
        await asyncio.wait_for(host.start(ID, {}, 3, 5), 2)

    asyncio.run(main())


def test_waiting_for_admission_and_for_others_is_free():
    async def main():
        host = EnvHost(max_instances=2)

        async def episode(seed: int) -> None:
            id, *_ = await host.start(ID, {}, seed, 0.25)
            await host.step(id, "sleep 0.1", 0.25)
            await host.step(id, "end", 0.25)

        faulty.RUNNING.update(now=0, most=0)
        began = time.monotonic()
        await asyncio.gather(*(episode(seed) for seed in range(8)))
        assert time.monotonic() - began > 0.8  # far more than one deadline
        assert faulty.RUNNING["most"] == 1

    asyncio.run(main())


def test_safe_environments_may_run_side_by_side():
    async def main():
        host = EnvHost(threads=4)
        faulty.RUNNING.update(now=0, most=0)
        ids = [(await host.start(ID, {}, seed, 5))[0] for seed in range(4)]
        await asyncio.gather(*(host.step(id, "sleep 0.2", 5) for id in ids))
        assert faulty.RUNNING["most"] == 4

    asyncio.run(main())


def test_environments_are_reused_within_the_limit():
    async def main():
        faulty.MADE.clear()
        host = EnvHost(max_instances=2)
        for seed in range(3):
            id, *_ = await host.start(ID, {}, seed, 5)
            await host.step(id, "end", 5)
        assert len(faulty.MADE) == 1
        id, *_ = await host.start(ID, {"steps": 5}, 0, 5)  # other arguments: another environment
        await host.close(id)
        assert len(faulty.MADE) == 2
        await host.start(ID, {"steps": 6}, 0, 5)  # no room for a third: the least recently used one goes
        assert [env.closed for env in faulty.MADE] == [True, False, False]
        assert await host.load() == {"open": 1, "idle": 1, "max_instances": 2}

    asyncio.run(main())


def test_closing_during_a_step_waits_for_the_step():
    async def main():
        host = EnvHost(max_instances=1)
        id, *_ = await host.start(ID, {}, 0, 5)
        step = asyncio.create_task(host.step(id, "sleep 0.2", 5))
        await asyncio.sleep(0.05)
        await host.close(id)
        assert step.done()
        assert (await host.load())["idle"] == 1

    asyncio.run(main())


def test_a_caller_that_goes_away_leaves_a_working_host():
    async def main():
        host = EnvHost(max_instances=1)
        id, *_ = await host.start(ID, {}, 0, 5)
        step = asyncio.create_task(host.step(id, "sleep 30", 60))
        await asyncio.sleep(0.05)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        id, *_ = await asyncio.wait_for(host.start(ID, {}, 1, 5), 2)
        assert (await host.step(id, "go", 5))[0] == "fine"

    asyncio.run(main())


def test_a_module_that_cannot_be_imported_is_a_failure_with_the_key():
    async def main():
        error = await failure(EnvHost(modules=["no_such_module_xyz"]).start(ID, {}, 0, 5))
        assert error.kind == "reset"
        assert "turnkey.modules" in error.message

    asyncio.run(main())


def test_the_custom_environment_of_the_examples():
    async def main():
        host = EnvHost(modules=[CUSTOM])
        id, observation, info = await host.start("example/GuessNumber-v0", {"highest": 8}, 3, 5)
        assert (observation, info["task"]) == ("Guess.", "Find the number between 1 and 8.")
        assert (await host.step(id, "seven", 5))[4]["invalid"]
        low, high, reward = 1, 8, 0.0
        for _ in range(4):
            guess = (low + high) // 2
            observation, reward, terminated, _, info = await host.step(id, str(guess), 5)
            if terminated:
                break
            low, high = (guess + 1, high) if observation == "Higher." else (low, guess - 1)
        assert (reward, info["won"]) == (1.0, True)

    asyncio.run(main())


def test_in_ray():
    # A short path: Ray puts sockets under it.
    with tempfile.TemporaryDirectory(prefix="tk", ignore_cleanup_errors=True) as folder:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=folder, log_to_driver=False)
        try:
            asyncio.run(_in_ray())
        finally:
            ray.shutdown()


async def _in_ray() -> None:
    pool = HostPool(2, "t", max_instances=2, step_timeout=1.0, modules=[FAULTY])
    twin = HostPool(2, "t", max_instances=2, modules=[FAULTY])  # another process would find the same actors
    assert [a._actor_id for a in pool._hosts] == [a._actor_id for a in twin._hosts]

    first, second = [await pool.start(ID, {}, seed) for seed in (1, 2)]
    assert sorted(pool._loads) == [1, 1]
    assert first.info["task"] == "seed 1"
    step = await first.step("reward 0.25")
    assert (step.observation, step.reward, step.terminated) == ("fine", 0.25, False)
    for action, kind in (("raise", "step"), ("reward nan", "reward"), ("sleep 30", "timeout")):
        episode = await pool.start(ID, {}, 3)
        error = await failure(episode.step(action))
        assert type(error) is EnvironmentFailure
        assert error.kind == kind
        assert (await failure(episode.step("more"))).kind == "closed"
    assert sum(pool._loads) == 2
    first.close()
    first.close()
    assert (await second.step("end")).terminated
    assert sum(pool._loads) == 0

    async def brief(seed: int) -> None:
        (await pool.start(ID, {}, seed)).close()

    await asyncio.wait_for(asyncio.gather(*(brief(seed) for seed in range(9))), 20)  # room for four
    assert sum(pool._loads) == 0

    frozen_pool = HostPool(1, "f", modules=[FAULTY])
    frozen = await frozen_pool.start(ID, {}, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "LIVENESS_SECONDS", 0.5)
        error = await failure(frozen.step("freeze"))  # the whole process: no deadline inside it can run out
    assert error.kind == "host"
    assert "blocked" in error.message

    victim = await pool.start(ID, {}, 1)
    ray.kill(pool._hosts[victim._host], no_restart=True)
    assert (await failure(victim.step("go"))).kind == "host"
    assert sum(pool._loads) == 0
