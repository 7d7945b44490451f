"""The watchdog on real actors: killed ones, ones whose engine is dead, ones that compute, and none that moves."""

from __future__ import annotations

import itertools
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from contract_tools import kill
from ray.exceptions import OutOfMemoryError

from verl_turnkey.plugins.shutdown.watchdog import Watchdog


@ray.remote(num_cpus=0)
class Actor:
    def __init__(self, errored: bool | None = None) -> None:
        if errored is not None:
            self.engine = type("Engine", (), {"errored": errored})()

    def compute(self, seconds: float) -> None:
        time.sleep(seconds)


@pytest.fixture
def actors(ray_queue) -> Iterator[dict[str, Any]]:
    made = {"well": Actor.remote(), "serving": Actor.remote(False), "ended": Actor.remote(True)}
    made |= {"killed": Actor.remote(), "busy": Actor.remote()}
    ray.get([actor.__ray_ready__.remote() for actor in made.values()])
    kill(made["killed"])
    made["busy"].compute.remote(600)
    yield made
    for actor in made.values():
        ray.kill(actor)


def quiet(actors: Mapping[str, Any]) -> Watchdog:
    """A watchdog whose looks are the test's; half a minute is enough for an actor on a busy machine to answer."""
    return Watchdog(60, lambda: 1, lambda: actors, lambda _: None, look_seconds=60)


def test_the_dead_are_told_from_the_busy(actors: dict[str, Any]):
    dead, silent = quiet(actors).examine()
    assert sorted(dead) == ["ended", "killed"]
    assert dead["ended"] == "its engine is dead"
    assert "died" in dead["killed"] or "killed" in dead["killed"]
    assert silent == ["busy"]
    assert quiet({}).examine() == ({}, [])
    imported = actors["well"].__ray_call__.remote(lambda _: {"verl", "torch"} & {*sys.modules})
    assert not ray.get(imported)  # an import of the trainer takes 20 seconds, in each process that is asked


def test_a_busy_process_is_asked_once(actors: dict[str, Any]):
    calls: list[Any] = []

    def remote(function: Any) -> Any:
        calls.append(function)
        return actors["busy"].__ray_call__.remote(function)

    busy = {"busy": SimpleNamespace(__ray_call__=SimpleNamespace(remote=remote))}
    dog = Watchdog(60, lambda: 1, lambda: busy, lambda _: None, look_seconds=1)
    assert [dog.examine() for _ in range(2)] == [({}, ["busy"])] * 2
    assert len(calls) == 1


def test_one_that_ray_killed_for_memory_is_dead(ray_queue):
    @ray.remote(num_cpus=0, max_retries=0)
    def killed(_: Any) -> None:
        raise OutOfMemoryError("the node ran low on memory")

    dead, silent = quiet({"worker": SimpleNamespace(__ray_call__=killed)}).examine()
    assert ([*dead], silent) == (["worker"], [])


@pytest.mark.parametrize("moves", [True, False])
def test_a_dead_process_is_reported_whether_or_not_something_moves(actors: dict[str, Any], moves: bool):
    counts, reports, reported = itertools.count(), [], threading.Event()

    def report(text: str) -> None:
        reports.append(text)
        reported.set()

    with Watchdog(60, lambda: next(counts) if moves else 1, lambda: actors, report, look_seconds=0.2):
        assert reported.wait(60)
    assert len(reports) == 1
    # the first to answer, or both
    assert re.match(r"(a process|processes) died: (killed|ended: its engine is dead)", reports[0])
    assert "busy" not in reports[0]


def test_slow_ones_are_warned_of_once(actors: dict[str, Any], caplog):
    caplog.set_level(logging.WARNING)
    looks, reports = itertools.count(), []
    enough = threading.Event()

    def these() -> dict[str, Any]:
        if next(looks) > 3:
            enough.set()
        return {name: actors[name] for name in ("well", "serving", "busy")}

    with Watchdog(0.1, lambda: 1, these, reports.append, look_seconds=1):
        assert enough.wait(300)
    assert reports == []
    warned = [record.getMessage() for record in caplog.records if "nothing has moved" in record.getMessage()]
    assert len(warned) == 1
    assert "every process is alive; without an answer: " in warned[0]
    assert warned[0].endswith("busy")


def test_without_patience_nobody_is_asked(actors: dict[str, Any]):
    looks: list[int] = []
    with Watchdog(None, lambda: 1, lambda: looks.append(1) or actors, looks.append, look_seconds=0.1):
        time.sleep(1)
    assert looks == []
