"""Processes of environments: how they start and end, copies of a host's template, and when a host closes idle ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from live_processes import alive, soon

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.hosting import capacity, processes
from verl_turnkey.envs.hosting import host as hosts
from verl_turnkey.envs.hosting.host import EnvHost
from verl_turnkey.envs.hosting.processes import Copy, Fresh, Templates
from verl_turnkey.envs.hosting.workers import ProcessWorker
from verl_turnkey.envs.process_tree import MARK


@pytest.mark.parametrize(
    ("number", "name"), [(signal.SIGKILL, "SIGKILL"), (signal.SIGRTMIN + 5, f"signal {signal.SIGRTMIN + 5}")]
)
async def test_every_signal_that_kills_is_told(monkeypatch, tmp_path, number, name):
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])  # a Path, as some programs put there
    worker = await ProcessWorker.spawn()
    os.kill(worker._process.pid, number)
    with pytest.raises(EnvironmentFailure, match=f"was killed by {name}.* during a test"):
        await worker.call("close", (), 20.0, "a test", "key")
    assert isinstance(sys.path[-1], Path)


@pytest.mark.parametrize(("threads", "kept"), [(None, "1"), ("4", "4")])
async def test_the_process_sees_no_device_and_nothing_of_ray(monkeypatch, threads, kept):
    """It would take memory of the GPU, or the cluster for its own; its threads would fill the machine."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setenv("SOMETHING_ELSE", "stays")
    if threads is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    worker = await ProcessWorker.spawn()
    try:
        environment = variables(worker._process.pid)
    finally:
        worker.kill()
    assert environment["CUDA_VISIBLE_DEVICES"] == ""
    assert (environment["OMP_NUM_THREADS"], environment["SOMETHING_ELSE"]) == (kept, "stays")
    assert not [name for name in environment if name.startswith("RAY_")]


#: In a process of its own: threads of Ray in this one would find no descriptors either.
WITHOUT_DESCRIPTORS = """
import asyncio, contextlib, os, resource, sys
from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.hosting.processes import new_mark
from verl_turnkey.envs.hosting.workers import ProcessWorker

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


FAULTY = str(Path(__file__).parent / "faulty_envs.py")
ALONE = "test/Faulty-v0"


def variables(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(entry.split("=", 1) for entry in entries if entry)


class Worker:
    """A process with one environment, and the calls of a host."""

    def __init__(self, worker: ProcessWorker) -> None:
        self.worker, self.pid = worker, worker._process.pid

    @classmethod
    async def of(cls, templates: Templates) -> Worker:
        made = cls(await ProcessWorker.spawn([FAULTY], templates))
        assert isinstance(made.worker._process, Copy)
        await made.worker.call("start", (ALONE, {}, 1), 60.0, "its reset", "key")
        return made

    async def does(self, action: str, seconds: float = 60.0) -> str:
        return str((await self.worker.call("step", (action,), seconds, "its step", "key"))[0])


async def test_copies_do_not_know_of_each_other():
    templates = Templates([FAULTY])
    first, second = [await Worker.of(templates) for _ in range(2)]
    assert os.getpgid(first.pid) == os.getsid(first.pid) == first.pid != second.pid
    assert await first.does("known") == "[]"
    assert await first.does("read") == "''"
    drawn = [await worker.does("chance global") for worker in (first, second)]
    assert drawn[0] != drawn[1]
    await first.does("print of the first")
    assert "of the first" in first.worker._tail()
    assert not second.worker._tail()
    marks = [variables(worker.pid)[MARK] for worker in (first, second)]
    assert marks == [worker.worker._mark for worker in (first, second)]
    assert marks[0] != marks[1]
    sockets = {os.readlink(f"/proc/{second.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{second.pid}/fd")}
    assert len([name for name in sockets if name.startswith("socket:")]) == 1  # its own
    first.worker.kill()
    assert await soon(lambda: not alive(first.pid))
    assert await second.does("anything") == "fine"
    second.worker.kill()
    await templates.close()


@pytest.mark.parametrize(
    ("action", "how"), [("vanish 7", "ended with exit status 7"), ("crash", "was killed by SIGSEGV")]
)
async def test_how_a_copy_ended_is_told(action, how):
    templates = Templates([FAULTY])
    worker = await Worker.of(templates)
    with pytest.raises(EnvironmentFailure, match=how):
        await worker.does(action)
    assert await soon(lambda: not alive(worker.pid))
    assert await soon(lambda: not Path(f"/proc/{worker.pid}").exists())  # no zombie either
    await templates.close()


async def test_a_copy_that_hangs_is_killed_with_what_it_started_and_forked():
    templates = Templates([FAULTY])
    worker = await Worker.of(templates)
    started = int(await worker.does("start"))
    forked = int(await worker.does("stray"))
    assert alive(started)
    assert alive(forked)
    with pytest.raises(EnvironmentFailure, match=r"took longer than 0.5 s[\s\S]*do_sleep"):
        await worker.does("sleep 100", 0.5)
    for pid in (worker.pid, started, forked):
        assert await soon(lambda pid=pid: not alive(pid))
    await templates.close()


async def test_a_copy_closes_its_environment_and_leaves_by_itself():
    templates = Templates([FAULTY])
    worker = await Worker.of(templates)
    await worker.worker.retire(60.0)
    assert await worker.worker._process.status() == 0
    await templates.close()


async def test_a_template_that_dies_costs_nothing():
    templates = Templates([FAULTY])
    worker = await Worker.of(templates)
    os.kill(templates._started[0].pid, signal.SIGKILL)
    assert await worker.does("anything") == "fine"
    instead = await ProcessWorker.spawn([FAULTY], templates)
    assert isinstance(instead._process, Fresh)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(EnvironmentFailure, match="during its step"):
        await worker.does("anything")
    assert await soon(lambda: not alive(worker.pid))
    again = await Worker.of(templates)
    for process in (instead, again.worker):
        process.kill()
    await templates.close()


async def test_a_template_that_cannot_be_started_costs_nothing(monkeypatch):
    without_template = f"import sys\nif '{{0}}' == '{processes.__name__}': sys.exit(1)\n"
    monkeypatch.setattr(processes, "_BOOT", without_template + processes._BOOT)
    worker = await ProcessWorker.spawn([FAULTY], Templates([FAULTY]))
    assert isinstance(worker._process, Fresh)
    worker.kill()


async def test_who_goes_away_while_a_copy_is_made_takes_nobodys_answer():
    templates = Templates([FAULTY])
    (await Worker.of(templates)).worker.kill()
    for wait in (0.0, 0.001, 0.002, 0.005):
        spawning = asyncio.create_task(ProcessWorker.spawn([FAULTY], templates))
        await asyncio.sleep(wait)
        spawning.cancel()
    workers = await asyncio.gather(*(Worker.of(templates) for _ in range(3)))
    assert [int(await worker.does("pid")) for worker in workers] == [worker.pid for worker in workers]
    for worker in workers:
        worker.worker.kill()
    parent = templates._started[0].pid
    children = Path(f"/proc/{parent}/task/{parent}/children")
    assert await soon(lambda: not children.read_text().split())
    await templates.close()


async def test_a_host_copies_what_it_knows_to_need_a_process_and_leaves_nothing():
    host = EnvHost([FAULTY], places=3)
    for name in "abc":
        await host.start(name, ALONE, {}, 1, 120.0)
    kinds = [type(host._open[name].instance.worker._process) for name in "abc"]
    assert kinds == [Fresh, Copy, Copy]
    templates = host._instances._templates
    pids = [templates._started[0].pid, *(host._open[name].instance.worker._process.pid for name in "abc")]
    assert all(map(alive, pids))
    await host.shutdown()
    for pid in pids:
        assert await soon(lambda pid=pid: not alive(pid))


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


@pytest.fixture
def modules(tmp_path: Path) -> list[str]:
    (tmp_path / "keeper.py").write_text(CLASS)
    return [str(tmp_path / "keeper.py")]


async def test_environments_that_nobody_needs_are_closed(modules, monkeypatch):
    monkeypatch.setattr(hosts, "IDLE_SECONDS", 600.0)
    monkeypatch.setattr(hosts, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(capacity, "lacking_memory_mb", lambda: 0)  # whatever this machine lacks
    host = EnvHost(modules, places=4)
    pids = [int((await host.start(name, ENV, {}, 1, 60))[0]) for name in ("a", "b")]
    await host.step("a", "0", 20)
    await host.step("b", "0", 20)
    assert (await host.load())["idle"] == 2
    host._instances.idle[0].released -= 600
    assert await soon(lambda: not alive(pids[0]))
    assert int((await host.start("c", ENV, {}, 1, 60))[0]) == pids[1]  # its time had not come
    await asyncio.sleep(0.5)
    assert alive(pids[1])  # in use
    await host.step("c", "0", 20)
    host._instances.idle[0].released -= 600
    assert await soon(lambda: not alive(pids[1]))
    assert (await host.load())["idle"] == 0
    await host.shutdown()


async def test_what_was_idle_longest_is_closed_while_memory_is_scarce(modules, monkeypatch):
    monkeypatch.setattr(hosts, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(capacity, "lacking_memory_mb", lambda: 0)  # whatever this machine lacks
    looks = []

    def lack() -> int:
        looks.append(0)
        return 10 if len(looks) == 1 else 0  # less than one process has; and the machine has two hosts

    host = EnvHost(modules, places=4, sharers=2)
    pids = [int((await host.start(name, ENV, {}, 1, 60))[0]) for name in ("a", "b", "c")]
    for name in ("b", "a", "c"):
        await host.step(name, "0", 20)
    monkeypatch.setattr(capacity, "lacking_memory_mb", lack)
    assert await soon(lambda: not alive(pids[1]))
    while len(looks) < 3:
        await asyncio.sleep(0.02)
    assert alive(pids[0])
    assert alive(pids[2])
    assert (await host.load())["idle"] == 2
    await host.shutdown()


async def test_a_process_that_grew_is_not_used_again(modules):
    host = EnvHost(modules, places=2)

    async def episode(megabytes: int) -> int:
        pid = int((await host.start("a", ENV, {}, 1, 60))[0])
        await host.step("a", str(megabytes), 20)
        return pid

    first = await episode(200)  # large from the start: that is its size
    assert await episode(100) == first
    assert await episode(500) == first  # seen at its end
    assert await soon(lambda: not alive(first))
    assert await episode(0) != first
    await host.shutdown()


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


async def test_what_a_used_process_cannot_reset_a_new_one_can(tmp_path: Path):
    """Where the leak is too small to be seen at the end of an episode."""
    (tmp_path / "leaking.py").write_text(LEAKING)
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
