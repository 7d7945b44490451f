"""A host: whatever an environment does ends one episode and nothing else, in a thread or in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from live_processes import alive, dead_soon

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.hosting import capacity, processes, workers
from verl_turnkey.envs.hosting.capacity import RestartBudget
from verl_turnkey.envs.hosting.host import EnvHost
from verl_turnkey.envs.hosting.runner import Declared
from verl_turnkey.envs.user_modules import import_modules

FAULTY = str(Path(__file__).parent / "faulty_envs.py")
CUSTOM = str(Path(__file__).parents[4] / "examples" / "custom_env.py")
ALONE, SAFE = "test/Faulty-v0", "test/Safe-v0"
import_modules([FAULTY])
faulty = next(module for name, module in sys.modules.items() if name.startswith("turnkey_user_faulty_envs"))
Run = Callable[[Coroutine[Any, Any, Any]], Any]
_names = (f"episode-{n}" for n in itertools.count())


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine a process takes its time to end, or to print its stacks."""
    monkeypatch.setattr(processes, "EXIT_SECONDS", 20.0)
    monkeypatch.setattr(workers, "_DUMP_SECONDS", 2.0)


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """One event loop for all tests of this file, so that they may share processes: those start slowly."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.close()


@pytest.fixture(scope="module")
def shared_host(run: Run) -> Iterator[EnvHost]:
    """A host that has imported everything, with the budget to lose many processes."""
    shared = EnvHost([FAULTY], places=3, restarts=100)

    async def warm_up() -> None:
        for env_id in (ALONE, SAFE, "test/Copied-v0", "test/Cloned-v0"):
            await shared.close((await opened(shared, env_id))[0])

    run(warm_up())
    yield shared
    run(shared.shutdown())


@pytest.fixture
def host(run: Run, shared_host: EnvHost) -> Iterator[EnvHost]:
    """The shared one, without episodes: what a test that fails leaves open would keep out the next one's."""
    yield shared_host

    async def clear() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for name in list(shared_host._open):
            shared_host._drop(name)

    run(clear())


@pytest.fixture
def made(run: Run, shared_host: EnvHost) -> Iterator[Callable[..., EnvHost]]:
    """``made(**arguments)``: a host of the test's own, which need not find out again what classes declare."""
    hosts = []

    def make(modules: list[str] | None = None, **arguments: Any) -> EnvHost:
        hosts.append(EnvHost(modules or [FAULTY], **arguments))
        hosts[-1]._admission.declared.update(shared_host._admission.declared)
        return hosts[-1]

    yield make
    for host in hosts:
        run(host.shutdown())


async def opened(host: EnvHost, env_id: str = SAFE, seed: int | None = 1, timeout: float = 20, **kwargs: Any) -> Any:
    """A new episode: its name, the first observation, the info."""
    name = next(_names)
    observation, info, _ = await host.start(name, env_id, kwargs, seed, timeout)
    return name, observation, info


async def failure(awaitable: Any) -> EnvironmentFailure:
    with pytest.raises(EnvironmentFailure) as caught:
        await awaitable
    return caught.value


# --- episodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", [SAFE, ALONE])
async def test_an_episode_from_start_to_end(host, env_id):
    name, observation, info = await opened(host, env_id, 4)
    assert observation == "fine"
    assert info == {"state_key": "4, 0", "admissible": None, "success": None, "invalid": False, "task": "seed 4"}
    answer = await host.step(name, "reward 0.5", 5)
    assert answer[:4] == ("fine", 0.5, False, False)
    assert answer[4]["state_key"] == 1
    assert (await host.step(name, "end", 5))[2:4] == (True, False)
    assert (await failure(host.step(name, "more", 5))).kind == "closed"
    await host.close(name)
    await host.close(name)
    assert (await host.load())["open"] == 0


async def test_a_truncated_episode_gives_its_place_back(made):
    host = made(places=1)
    name, *_ = await opened(host, SAFE, steps=1)
    assert (await host.step(name, "go", 5))[2:4] == (False, True)
    assert (await host.load())["open"] == 0
    await asyncio.wait_for(opened(host, SAFE), 10)


@pytest.mark.parametrize("env_id", [SAFE, ALONE])
async def test_a_host_measures_its_environments_calls(made, env_id):
    host = made(places=2)
    names = [(await opened(host, env_id))[0] for _ in range(2)]
    await host.measure()
    await host.step(names[0], "sleep 0.2", 5)
    busy = asyncio.create_task(host.step(names[0], "sleep 1", 5))
    while not host._instances.measures.in_flight and not busy.done():
        await asyncio.sleep(0.01)
    measured = await host.measure()
    assert [measured[name] for name in ("open", "waiting", "in_flight", "lost")] == [2, 0, 1, 0]
    assert len(measured["step"]) == 1
    assert 0.2 <= measured["step"][0] < 5
    await busy
    assert (await failure(host.step(names[1], "sleep 30", 0.1))).kind == "timeout"
    measured = await host.measure()
    assert [len(measured["step"]), len(measured["reset"]), measured["lost"], measured["open"]] == [2, 0, 1, 1]


async def test_where_environments_live(host):
    names = [(await opened(host, env_id))[0] for env_id in (SAFE, ALONE, ALONE)]
    pids = [int((await host.step(name, "pid", 5))[0]) for name in names]
    assert pids[0] == os.getpid()
    assert len(set(pids)) == 3
    assert (await host.step(names[1], "known", 5))[0] == "[]"
    for name in names:
        await host.close(name)
    name, *_ = await opened(host, ALONE)
    assert int((await host.step(name, "pid", 5))[0]) in pids  # used again
    await host.close(name)


FAULTS = yaml.safe_load((Path(__file__).parents[3] / "data/environment_faults.yaml").read_text(encoding="utf-8"))
OF_ANY, OF_PROCESSES = FAULTS["steps"], FAULTS["steps_of_processes"]


@pytest.mark.parametrize(
    ("env_id", "action", "kind", "words"),
    [(SAFE, *fault) for fault in OF_ANY] + [(ALONE, *fault) for fault in OF_ANY[::3] + OF_PROCESSES],
)
async def test_a_bad_step_ends_its_episode_and_no_other(host, env_id, action, kind, words):
    good, *_ = await opened(host, ALONE)
    bad, *_ = await opened(host, env_id)
    processes = [int((await host.step(bad, what, 5))[0]) for what in ("pid", "start")] if env_id == ALONE else []
    error = await failure(host.step(bad, action, 3 if kind == "timeout" else 30))
    assert error.kind == kind
    assert re.search(words, error.message)
    assert dead_soon(*processes)  # also what it has started in a session of its own
    assert (await host.step(good, "go", 5))[0] == "fine"
    assert (await failure(host.step(bad, "go", 5))).kind == "closed"
    await host.close(good)
    assert (await host.load())["open"] == 0
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.kind, copy.message) == (error.kind, error.message)


@pytest.mark.parametrize(
    ("env_id", "kwargs", "kind", "words"),
    [
        (SAFE, {"on_reset": "raise"}, "reset", "Strange: strange 1"),
        (ALONE, {"on_reset": "raise"}, "reset", "Strange: strange 1"),
        (ALONE, {"on_reset": "observe"}, "reset", "observation must be text"),
        (SAFE, {"on_reset": "sleep 30"}, "timeout", "reset_timeout"),
        (ALONE, {"on_reset": "sleep 30"}, "timeout", "reset_timeout"),
        (ALONE, {"on_reset": "vanish 1"}, "process", "exit status 1 during reset of test/Faulty-v0 {'on_reset': 'van"),
        (ALONE, {"on_rest": "ok"}, "make", "did you mean 'on_reset'"),
        ("test/Fauly-v0", {}, "make", "did you mean 'test/Faulty-v0'"),
        (ALONE, {"on_reset": lambda: "ok"}, "reset", "cannot be sent to a process"),
    ],
)
async def test_a_bad_start_frees_its_place(made, env_id, kwargs, kind, words):
    host = made(places=1, calls=1)
    await host.close((await opened(host, SAFE))[0])
    error = await failure(opened(host, env_id, timeout=0.5 if kind == "timeout" else 30, **kwargs))
    assert error.kind == kind
    assert words in error.message
    await asyncio.wait_for(opened(host, SAFE), 20)  # not as long as it sleeps


# --- large, strange, nosy ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", [SAFE, ALONE])
async def test_large_and_strange_texts_arrive_as_they_are(host, env_id):
    name, *_ = await opened(host, env_id)
    assert (await host.step(name, "length " + "x" * 100_000, 5))[0] == "100000"
    observation = (await host.step(name, "big 1000000", 5))[0]
    assert observation == "ö" * 1_000_000
    strange = "".join(map(chr, range(32))) + "\x7f\u202e\ud800\U0001f600 ' \" \\"
    # Half a surrogate pair alone cannot be written as UTF-8, so it goes.
    assert (await host.step(name, f"echo {strange}", 5))[0] == strange.replace("\ud800", "?")
    await host.close(name)


@pytest.mark.parametrize("env_id", [SAFE, ALONE])
async def test_images_and_extra_values_arrive_as_plain_data(host, env_id):
    name, *_ = await opened(host, env_id)
    info = (await host.step(name, "pictures", 5))[4]
    assert info["extra"] == {"n": 3, "of": [1.5, None], "array": [0, 1]}
    zeros, ones = info["images"]
    assert (zeros.shape, zeros.dtype, zeros.sum()) == ((2, 3, 3), "uint8", 0)
    assert (ones.shape, ones.sum()) == ((1, 1, 3), 3)
    assert not {"images", "extra"} & {*(await host.step(name, "go", 5))[4]}
    error = await failure(host.step(name, "secret", 5))
    assert "info['extra'] must hold numbers, texts, lists and dicts, not lock" in error.message


async def test_what_an_environment_does_to_its_process_stays_there(host):
    first, second = [(await opened(host, ALONE))[0] for _ in range(2)]
    before = (await host.step(second, "chance own", 5))[0]
    chances = []
    for _ in range(2):
        await host.step(first, "seed 0", 5)
        chances += [(await host.step(name, "chance global", 5))[0] for name in (first, second)]
    assert chances[0] == chances[2]
    assert chances[1] != chances[3]  # the other one's generator is not set back
    assert (await host.step(second, "chance own", 5))[0] != before
    assert (await host.step(first, "read", 5))[0] == "''"  # nothing to eat
    for name in (first, second):
        await host.close(name)


async def test_a_forked_copy_does_not_answer(host):
    name, *_ = await opened(host, ALONE)
    pid = (await host.step(name, "pid", 5))[0]
    copy = (await host.step(name, "fork", 5))[0].split()[1]
    assert int(copy) > 0
    for n in range(3):
        assert (await host.step(name, f"echo {n}", 5))[0] == str(n)
    assert (await host.step(name, "pid", 5))[0] == pid
    assert dead_soon(int(copy))
    await host.close(name)


async def test_the_end_of_the_output_is_shown(host):
    name, *_ = await opened(host, ALONE)
    await host.step(name, "print said by an earlier episode", 5)
    await host.close(name)
    name, *_ = await opened(host, ALONE)
    await host.step(name, "print what Python says", 5)
    error = await failure(host.step(name, "raise", 5))
    assert error.message.endswith("Its last output:\nwhat Python says\nfrom C")
    name, *_ = await opened(host, ALONE)
    await host.step(name, "flood 3000000", 20)  # more than any pipe holds: nobody waits for a reader
    error = await failure(host.step(name, "vanish 1", 5))
    assert error.message.endswith("xxx\nthe end of the flood\nfrom C")
    assert len(error.message) < 3000


LONE_HOST = """
import asyncio, sys
from verl_turnkey.envs.hosting.host import EnvHost

async def main():
    host = EnvHost([sys.argv[1]])
    await host.start("a", "test/Faulty-v0", {}, 1, 20)
    print(*[(await host.step("a", what, 5))[0] for what in ("pid", "start")], flush=True)
    await host.step("a", "lock", 60)

asyncio.run(main())
"""


def test_no_process_outlives_its_host():
    lone = subprocess.Popen([sys.executable, "-c", LONE_HOST, FAULTY], stdout=subprocess.PIPE, text=True)
    assert lone.stdout is not None
    pids = [int(pid) for pid in lone.stdout.readline().split()]
    time.sleep(0.3)  # now the environment keeps its interpreter from noticing anything
    assert all(map(alive, pids))
    lone.send_signal(signal.SIGKILL)
    lone.wait()
    lone.stdout.close()
    assert len(pids) == 2
    assert dead_soon(*pids)


# --- imports ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "kind", "words"), FAULTS["imports"])
async def test_a_class_that_cannot_be_imported(made, tmp_path, monkeypatch, code, kind, words):
    (tmp_path / "broken_import.py").write_text(code)
    register = tmp_path / "register.py"
    register.write_text("import gymnasium\ngymnasium.register('test/Broken-v0', entry_point='broken_import:Broken')\n")
    monkeypatch.syspath_prepend(tmp_path)
    host = made([FAULTY, str(register)])
    error = await failure(opened(host, "test/Broken-v0", timeout=10 if kind == "timeout" else 30))
    assert error.kind == kind
    assert re.search(words, error.message)
    assert (await host.load())["open"] == 0


async def test_a_module_that_takes_its_time_is_imported_before_any_episode_starts(made, tmp_path):
    slow = tmp_path / "slow_module.py"
    slow.write_text(
        "import time\nimport gymnasium\ntime.sleep(0.3)\n"
        "class Slow(gymnasium.Env):\n    metadata = {'render_modes': [], 'thread_safe': True}\n"
        "    def reset(self, *, seed=None, options=None):\n        return 'here', {}\n"
        "gymnasium.register('test/Slow-v0', entry_point=Slow)\n"
    )
    host = made([str(slow)], places=4)
    # Or a process would find it out, one at a time.
    host._admission.declared["test/Slow-v0"] = Declared(thread_safe=True)
    episodes = await asyncio.gather(*(opened(host, "test/Slow-v0") for _ in range(4)))
    assert [episode[1] for episode in episodes] == ["here"] * 4


async def test_a_module_that_cannot_be_imported_is_a_failure_with_the_key(made):
    error = await failure(opened(made(["no_such_module_xyz"])))
    assert error.kind == "reset"
    assert "turnkey.modules" in error.message


# --- places, turns and deadlines --------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", [SAFE, ALONE])
async def test_waiting_for_a_place_and_for_others_is_free(made, env_id):
    """One of two episodes holds the only turn for longer than all calls of the others may take."""
    deadline = 3.0
    host = made(places=2, calls=1)
    holder, second = [(await opened(host, env_id))[0] for _ in range(2)]
    await host.close(second)
    faulty.RUNNING.update(now=0, most=0)
    holding = asyncio.create_task(host.step(holder, f"sleep {deadline + 1}", 60))
    while not host._instances.measures.in_flight and not holding.done():
        await asyncio.sleep(0.01)
    assert host._instances.measures.in_flight

    async def episode(seed: int) -> None:
        name, *_ = await opened(host, env_id, seed, deadline)
        for action in ("sleep 0.1", "end"):
            await host.step(name, action, deadline)

    await asyncio.gather(holding, *(episode(seed) for seed in range(4)))
    assert faulty.RUNNING["most"] == (1 if env_id == SAFE else 0)


@pytest.mark.parametrize("env_id", [SAFE, ALONE])
async def test_environments_run_side_by_side(host, env_id, tmp_path):
    """Each waits until the others are in their step as well."""
    names = [(await opened(host, env_id))[0] for _ in range(3)]
    steps = await asyncio.gather(*(host.step(name, f"meet {tmp_path}", 60) for name in names))
    assert [step[0] for step in steps] == ["met"] * 3
    for name in names:
        await host.close(name)


async def test_environments_are_reused_within_the_limit(made):
    host = made(places=2)
    faulty.MADE.clear()
    for seed in range(3):
        name, *_ = await opened(host, SAFE, seed)
        await host.step(name, "end", 5)
    assert len(faulty.MADE) == 1
    await host.close((await opened(host, SAFE, steps=5))[0])  # other arguments: another environment
    assert len(faulty.MADE) == 2
    await opened(host, SAFE, steps=6)  # no room for a third: the least recently used one goes
    assert [env.closed for env in faulty.MADE] == [True, False, False]
    assert await host.load() == {"open": 1, "idle": 1, "waiting": 0, "process": os.getpid()}
    await opened(host, ALONE)  # of another class: no room for the idle one
    assert await host.load() == {"open": 2, "idle": 0, "waiting": 0, "process": os.getpid()}


async def test_places_by_memory(made, monkeypatch):
    monkeypatch.setattr(capacity, "free_memory_mb", lambda: 900)  # 450 for the host
    host = made()
    for _ in range(100):
        await opened(host, SAFE)  # declares 1 MB
    first, *_ = await opened(host, ALONE)  # 200, because it declares nothing
    second = asyncio.create_task(opened(host, ALONE))
    await asyncio.sleep(0.1)
    assert (await host.load())["waiting"] == 1
    await host.close(first)
    await asyncio.wait_for(second, 10)


async def test_places_by_memory_leave_room_for_clones(made, monkeypatch):
    monkeypatch.setattr(capacity, "free_memory_mb", lambda: 12)  # 6 for the host, of 1 MB each
    host = made(clones=2)
    names = [(await opened(host, "test/Cloned-v0"))[0] for _ in range(2)]
    third = asyncio.create_task(opened(host, "test/Cloned-v0"))
    await asyncio.sleep(0.1)
    assert (await host.load())["waiting"] == 1
    clones = [next(_names) for _ in range(4)]
    for place, clone in enumerate(clones):
        await host.clone(clone, names[place % 2], 20, 5)
    for clone in clones:  # they were counted with their episodes
        await host.close(clone)
    await asyncio.sleep(0.1)
    assert (await host.load())["waiting"] == 1
    await host.close(names[0])
    await asyncio.wait_for(third, 10)


async def test_a_replayed_clone_takes_no_room_that_is_left_for_it(made, monkeypatch):
    monkeypatch.setattr(capacity, "free_memory_mb", lambda: 900)  # 450 for the host, 200 an environment
    host = made(clones=1)
    name, *_ = await opened(host, ALONE)
    await host.clone(next(_names), name, 20, 5)
    second = asyncio.create_task(opened(host, ALONE))
    await asyncio.sleep(0.1)
    assert (await host.load())["waiting"] == 1
    await host.close(name)
    await asyncio.wait_for(second, 10)


async def test_who_gives_up_waiting_lets_the_next_one_in(made, monkeypatch):
    monkeypatch.setattr(capacity, "free_memory_mb", lambda: 500)  # 250 for the host
    host = made()
    await opened(host, ALONE)
    large, small = [asyncio.create_task(opened(host, env_id)) for env_id in (ALONE, SAFE)]
    await asyncio.sleep(0.05)
    assert (await host.load())["waiting"] == 2  # first come, first served
    large.cancel()
    await asyncio.wait_for(small, 10)
    assert (await host.load())["waiting"] == 0


@pytest.mark.parametrize("places", [1, "auto"])
async def test_who_is_let_in_and_goes_away_at_the_same_moment_leaves_the_place(made, monkeypatch, places):
    monkeypatch.setattr(capacity, "memory_for_a_host_mb", lambda sharers: 1)
    host = made(places=places)
    first = await opened(host, SAFE)
    if places == "auto":  # this one would be the first to find out what the class declares
        del host._admission.declared[SAFE]
    start = asyncio.create_task(opened(host, SAFE))
    await asyncio.sleep(0)
    assert (await host.load())["waiting"] == 1
    host._release(first[0])  # lets the start in, which is cancelled before it knows
    assert (await host.load())["waiting"] == 0
    start.cancel()
    await asyncio.gather(start, return_exceptions=True)
    await asyncio.wait_for(opened(host, SAFE), 20)


async def test_the_first_wave_is_let_in_by_what_the_class_declares(made, monkeypatch):
    """Not by the guess for a class that nobody has seen: one by the guess, all by the declaration."""
    monkeypatch.setattr(capacity, "memory_for_a_host_mb", lambda sharers: Declared().memory_mb)
    host = made()
    host._admission.declared.clear()
    episodes = await asyncio.wait_for(asyncio.gather(*(opened(host, SAFE) for _ in range(6))), 20)
    assert len({name for name, *_ in episodes}) == 6


async def test_an_environment_larger_than_the_room_runs_alone(made, monkeypatch):
    monkeypatch.setattr(capacity, "free_memory_mb", lambda: 10)
    host = made()
    name, *_ = await opened(host, ALONE)
    other = asyncio.create_task(opened(host, ALONE))
    await asyncio.sleep(0.1)
    assert not other.done()
    await host.close(name)
    await asyncio.wait_for(other, 10)


@pytest.fixture
def cgroups(tmp_path, monkeypatch) -> Path:
    """A machine of 64 CPUs on which ``/proc/self/cgroup`` and ``/sys/fs/cgroup`` are ours to fill."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(capacity, "_CGROUP", tmp_path)
    monkeypatch.setattr(capacity, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def hide_meminfo(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine has free is another number at every look."""
    text = capacity._text
    monkeypatch.setattr(capacity, "_text", lambda path: "" if path == Path("/proc/meminfo") else text(path))


def test_sizes_follow_the_machine_or_its_container(cgroups, monkeypatch):
    assert (capacity.cpus(), capacity.hosts(8), capacity.hosts(1)) == (64, 2, 4)
    assert (capacity.calls_at_once(8), capacity.starts_at_once(8)) == (32, 8)
    assert capacity.free_memory_mb() > 100
    hide_meminfo(monkeypatch)
    write(cgroups, cpu__max="200000 100000", memory__max=f"{512 << 20}", memory__current=f"{112 << 20}")
    assert (capacity.cpus(), capacity.hosts(8), capacity.calls_at_once(8), capacity.starts_at_once(8)) == (2, 1, 8, 1)
    assert capacity.free_memory_mb() == 400
    write(cgroups, cpu__max="max 100000")
    assert capacity.cpus() == 64


def test_memory_is_scarce_when_less_than_a_tenth_is_free(cgroups, monkeypatch):
    hide_meminfo(monkeypatch)
    write(cgroups, memory__max=f"{400 << 20}", memory__current=f"{370 << 20}")
    assert capacity.lacking_memory_mb() == 10
    write(cgroups, memory__current=f"{350 << 20}")
    assert capacity.lacking_memory_mb() == 0


def test_the_tightest_control_group_counts(cgroups):
    write(cgroups, membership="0::/slice/job")
    write(cgroups / "slice", cpu__max="300000 100000", memory__max=f"{50 << 20}", memory__current="0")
    write(cgroups / "slice" / "job", cpu__max="500000 100000", memory__max="max", memory__current="0")
    assert (capacity.cpus(), capacity.free_memory_mb()) == (3, 50)


@pytest.mark.parametrize("folder", [".", "docker/a1"], ids=["of the container", "of the host"])
def test_control_groups_of_version_1(cgroups, folder):
    """Inside a container the folder that the membership names is often the mount's root."""
    write(cgroups, membership="5:memory:/docker/a1\n4:cpu,cpuacct:/docker/a1\n1:name=systemd:/docker/a1\n0::/")
    cpu, memory = cgroups / "cpu" / folder, cgroups / "memory" / folder
    write(cpu, cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(memory, memory__limit_in_bytes="9223372036854771712", memory__usage_in_bytes=f"{90 << 20}")
    assert capacity.cpus() == 64
    assert capacity.free_memory_mb() > 100
    write(cpu, cpu__cfs_quota_us="400000")
    cache = "inactive_file 1\nactive_file 1\n" + f"total_inactive_file {20 << 20}\ntotal_active_file {5 << 20}"
    write(memory, memory__limit_in_bytes=f"{100 << 20}", memory__stat=cache)
    assert (capacity.cpus(), capacity.free_memory_mb()) == (4, 35)


# --- callers that change their mind -----------------------------------------------------------------------------------


async def test_closing_during_a_step_waits_for_the_step(made):
    host = made(places=1)
    name, *_ = await opened(host)
    step = asyncio.create_task(host.step(name, "sleep 0.2", 5))
    await asyncio.sleep(0.05)
    await host.close(name)
    assert step.done()
    assert (await host.load())["idle"] == 1


@pytest.mark.parametrize("env_id", [SAFE, ALONE])
async def test_a_caller_that_goes_away_leaves_a_working_host(made, env_id):
    host = made(places=1)
    name, *_ = await opened(host, env_id)
    step = asyncio.create_task(host.step(name, "sleep 30", 60))
    await asyncio.sleep(0.05)
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    name, *_ = await asyncio.wait_for(opened(host, env_id), 10)
    assert (await host.step(name, "go", 5))[0] == "fine"


@pytest.mark.parametrize("kwargs", [{}, {"on_reset": "sleep 30"}])
async def test_closing_an_episode_that_waits_or_starts_ends_that(made, kwargs):
    host = made(places=1)
    holder, *_ = await opened(host)
    name = next(_names)
    start = asyncio.create_task(host.start(name, SAFE, kwargs, 1, 60))
    await asyncio.sleep(0.05)
    if kwargs:  # else it still waits for its place
        await host.close(holder)
        await asyncio.sleep(0.05)
    await host.close(name)
    with pytest.raises(asyncio.CancelledError):
        await start
    if not kwargs:
        await host.close(holder)
    await asyncio.wait_for(opened(host), 20)  # not as long as it sleeps
    assert (await host.load())["open"] == 1


# --- the restart budget -----------------------------------------------------------------------------------------------


async def test_the_restart_budget(made):
    async def lose(host: EnvHost, status: int) -> EnvironmentFailure:
        name, *_ = await opened(host, ALONE)
        return await failure(host.step(name, f"vanish {status}", 5))

    host = made(places=1, restarts=1)
    assert (await lose(host, 1)).kind == "process"
    name, *_ = await opened(host, ALONE)
    await host.step(name, "go", 5)
    await host.close(name)  # went well: gives one back
    assert (await lose(host, 2)).kind == "process"
    name, *_ = await opened(host, ALONE)
    assert (await failure(host.step(name, "raise", 5))).kind == "step"  # costs no process
    name, *_ = await opened(host, ALONE)
    waiting = asyncio.create_task(opened(host, SAFE))
    assert (await failure(host.step(name, "vanish 3", 5))).kind == "process"  # its own reason, not the host's
    for refused in (waiting, opened(host, SAFE)):
        error = await failure(refused)
        assert error.kind == "restarts"
        assert "turnkey.env.restarts allows 1" in error.message
        assert "exit status 2" in error.message
        assert "exit status 3" in error.message
    assert not host._admission.is_exceeded_by(1)  # who was let in and refused holds no place


def test_the_restart_budget_shows_the_last_reasons_only():
    budget = RestartBudget(9)
    for n in range(9):
        budget.spend(f"reason {n} " + "x" * 1000)
    budget.check()
    budget.spend("reason 9")
    with pytest.raises(EnvironmentFailure) as caught:
        budget.check()
    assert [f"reason {n}" in caught.value.message for n in (6, 7, 8, 9)] == [False, True, True, True]
    assert len(caught.value.message) < 2000
    budget.refund()
    budget.check()


def test_losses_count_for_ten_minutes(monkeypatch):
    times = iter([0.0, 500.0, 599.0, 599.0, 601.0, 1101.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(times))
    budget = RestartBudget(1)
    for _ in range(3):
        budget.spend("a stall")
    with pytest.raises(EnvironmentFailure, match="3 environment processes or threads"):
        budget.check()
    with pytest.raises(EnvironmentFailure, match="2 environment processes or threads"):
        budget.check()
    budget.check()


# --- clones -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("env_id", [SAFE, ALONE, "test/Copied-v0", "test/Cloned-v0"])
async def test_a_clone_goes_on_by_itself(made, env_id):
    host = made(places=1)  # and the clone is let in all the same
    name, *_ = await opened(host, env_id)
    for action in ("keyless a", "go", "keyless b"):
        await host.step(name, action, 5)
    clone, second = next(_names), next(_names)
    await host.clone(clone, name, 20, 5)
    cloned = " cloned" if env_id == "test/Cloned-v0" else ""
    assert (await host.step(clone, "keyless x", 5))[0] == f"a b{cloned} x"
    assert (await host.step(name, "keyless y", 5))[0] == "a b y"
    assert (await host.step(clone, "go", 5))[4]["state_key"] == 5
    await host.clone(second, clone, 20, 5)  # a clone can be cloned
    assert (await host.step(second, "keyless", 5))[0].strip().startswith("a b")
    for env in (name, clone, second):
        await host.close(env)
    assert (await host.load())["open"] == 0
    await asyncio.wait_for(opened(host, env_id), 10)


@pytest.mark.parametrize(
    ("env_id", "seed", "action", "words"),
    [
        (SAFE, 1, "secretly", "came to another state after 2 of 3 actions"),
        (ALONE, 1, "keyless chance", None),
        (SAFE, None, "go", "without a seed"),
        ("test/Cloned-v0", 1, "keyless refuse", "RuntimeError: not now"),
    ],
)
async def test_a_clone_that_is_not_the_same_fails_alone(made, env_id, seed, action, words):
    host = made(places=1)
    name, *_ = await opened(host, env_id, seed)
    for text in ("go", action, "keyless x"):
        await host.step(name, text, 5)
    if words is None:
        await host.clone(next(_names), name, 20, 5)
    else:
        error = await failure(host.clone(next(_names), name, 20, 5))
        assert error.kind == "clone"
        assert words in error.message
    assert (await host.step(name, "go", 5))[0] == "fine"
    await host.close(name)
    if words is not None:
        await asyncio.wait_for(opened(host, env_id), 10)  # the one that failed has left


async def test_a_clone_whose_caller_goes_away_gives_its_place_back(made):
    host = made(places=1)
    name, *_ = await opened(host, SAFE)
    await host.step(name, "sleep 2", 5)
    clone = next(_names)
    cloning = asyncio.create_task(host.clone(clone, name, 20, 5))
    await asyncio.sleep(0.2)  # in the replay of the step
    await host.close(clone)
    with pytest.raises(asyncio.CancelledError):
        await cloning
    await host.close(name)
    await asyncio.wait_for(opened(host), 10)


# --- the example ------------------------------------------------------------------------------------------------------


async def test_the_custom_environment_of_the_examples(made):
    host = made([CUSTOM])
    name, observation, info = await opened(host, "example/GuessNumber-v0", 3, highest=8)
    assert (observation, info["task"]) == ("Guess.", "Find the number between 1 and 8.")
    for action in ("seven", "9" * 5000):
        assert (await host.step(name, action, 5))[4]["invalid"]
    low, high, reward = 1, 8, 0.0
    for _ in range(4):
        guess = (low + high) // 2
        observation, reward, terminated, _, info = await host.step(name, str(guess), 5)
        if terminated:
            break
        low, high = (guess + 1, high) if observation == "Higher." else (low, guess - 1)
    assert (reward, info["success"]) == (1.0, True)
