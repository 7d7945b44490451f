"""Processes of environments that are copies of their host's template: they are what fresh ones are."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from verl_turnkey.envs import EnvironmentFailure
from verl_turnkey.envs.hosting import fresh
from verl_turnkey.envs.hosting.fresh import Fresh
from verl_turnkey.envs.hosting.host import EnvHost
from verl_turnkey.envs.hosting.process import ProcessWorker
from verl_turnkey.envs.hosting.template import Copy, Templates
from verl_turnkey.envs.reaper import MARK

FAULTY = str(Path(__file__).parent / "faulty_envs.py")
ALONE = "test/Faulty-v0"


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 90))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def soon(true: Callable[[], Any]) -> bool:
    end = time.monotonic() + 60
    while not true() and time.monotonic() < end:
        await asyncio.sleep(0.02)
    return bool(true())


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


def test_copies_do_not_know_of_each_other():
    async def main():
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

    run(main)


@pytest.mark.parametrize(
    ("action", "how"), [("vanish 7", "ended with exit status 7"), ("crash", "was killed by SIGSEGV")]
)
def test_how_a_copy_ended_is_told(action, how):
    async def main():
        templates = Templates([FAULTY])
        worker = await Worker.of(templates)
        with pytest.raises(EnvironmentFailure, match=how):
            await worker.does(action)
        assert await soon(lambda: not alive(worker.pid))
        assert await soon(lambda: not Path(f"/proc/{worker.pid}").exists())  # no zombie either
        await templates.close()

    run(main)


def test_a_copy_that_hangs_is_killed_with_what_it_started_and_forked():
    async def main():
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

    run(main)


def test_a_copy_closes_its_environment_and_leaves_by_itself():
    async def main():
        templates = Templates([FAULTY])
        worker = await Worker.of(templates)
        await worker.worker.retire(60.0)
        assert await worker.worker._process.status() == 0
        await templates.close()

    run(main)


def test_a_template_that_dies_costs_nothing():
    async def main():
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

    run(main)


def test_a_template_that_cannot_be_started_costs_nothing(monkeypatch):
    monkeypatch.setattr(fresh, "_BOOT", "import sys\nif '{0}' == 'template': sys.exit(1)\n" + fresh._BOOT)

    async def main():
        worker = await ProcessWorker.spawn([FAULTY], Templates([FAULTY]))
        assert isinstance(worker._process, Fresh)
        worker.kill()

    run(main)


def test_who_goes_away_while_a_copy_is_made_takes_nobodys_answer():
    async def main():
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

    run(main)


def test_a_host_copies_what_it_knows_to_need_a_process_and_leaves_nothing():
    async def main():
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

    run(main)
