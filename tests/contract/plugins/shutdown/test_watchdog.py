"""The watchdog on real actors: killed ones, ones whose engine is dead, ones that compute, and none that moves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import OutOfMemoryError, RayActorError

from verl_turnkey.plugins.shutdown.watchdog import Watchdog, examine


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
    ray.kill(made["killed"])
    with suppress(RayActorError):
        while True:  # Ray kills in the background
            ray.get(made["killed"].__ray_ready__.remote())
    made["busy"].compute.remote(600)
    yield made
    for actor in made.values():
        ray.kill(actor)


def test_the_dead_are_told_from_the_busy(actors: dict[str, Any]):
    dead, silent = examine(actors, 10)
    assert sorted(dead) == ["ended", "killed"]
    assert dead["ended"] == "its engine is dead"
    assert "died" in dead["killed"] or "killed" in dead["killed"]
    assert silent == ["busy"]
    assert examine({}, 1) == ({}, [])


def test_one_that_ray_killed_for_memory_is_dead(ray_queue):
    @ray.remote(num_cpus=0, max_retries=0)
    def killed(_: Any) -> None:
        raise OutOfMemoryError("the node ran low on memory")

    dead, silent = examine({"worker": SimpleNamespace(__ray_call__=killed)}, 30)
    assert ([*dead], silent) == (["worker"], [])


def watched(
    actors: dict[str, Any], progress: Any, patience: float | None = 0.2
) -> tuple[list[str], threading.Event, Any]:
    reports, reported = [], threading.Event()

    def report(text: str) -> None:
        reports.append(text)
        reported.set()

    return reports, reported, Watchdog(patience, progress, lambda: actors, report, ping_seconds=3)


def test_a_dead_process_is_reported_once_nothing_moves(actors: dict[str, Any]):
    reports, reported, dog = watched(actors, lambda: 1)
    with dog:
        assert reported.wait(60)
    assert len(reports) == 1
    assert reports[0].startswith("nothing has moved for 0.2 s (turnkey.stop.patience), and dead are: ")
    assert "ended: its engine is dead" in reports[0]
    assert "busy" not in reports[0]


def test_slow_ones_are_warned_of_once(actors: dict[str, Any], caplog):
    caplog.set_level(logging.WARNING)
    looks = []

    def these() -> dict[str, Any]:
        looks.append(1)
        return {name: actors[name] for name in ("well", "serving", "busy")}

    reports: list[str] = []
    with Watchdog(0.1, lambda: 1, these, reports.append, ping_seconds=2):
        for _ in range(600):
            if len(looks) > 2:
                break
            time.sleep(0.1)
    assert len(looks) > 2
    assert reports == []
    warned = [record.getMessage() for record in caplog.records if "nothing has moved" in record.getMessage()]
    assert len(warned) == 1
    assert warned[0].endswith("every process is alive; no answer in 2 s: busy")


@pytest.mark.parametrize("patience", [0.5, None])
def test_nobody_is_asked_while_something_moves(actors: dict[str, Any], patience: float | None):
    counts = iter(range(10**9))
    reports, reported, dog = watched(actors, (lambda: next(counts)) if patience else (lambda: 1), patience)
    with dog:
        assert not reported.wait(3)
    assert reports == []
