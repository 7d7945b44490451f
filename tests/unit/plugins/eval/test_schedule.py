"""Which samples are played, how often, and what happens when one fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from verl_turnkey.envs.tasks import COLUMN, Task
from verl_turnkey.plugins.eval.result import Samples
from verl_turnkey.plugins.eval.run import ATTEMPTS, RESULT, finish, jobs, play_all

ROWS = [{COLUMN: Task("e", seed).to_json()} for seed in (1, 2, 3)]


def came(success: bool) -> dict[str, Any]:
    zeros = dict.fromkeys(("env_return", "composed_return", "invalid_rate", "unparsed_rate"), 0.0)
    return {**zeros, "success": success, "turns": 1, "truncated": False, "tokens": 1, "seconds": 0.1}


@pytest.fixture
def kept(tmp_path):
    samples = Samples(tmp_path, {"model": "m"})
    yield samples
    samples.close()


def test_every_task_has_its_first_sample_before_a_second(kept):
    todo = jobs(ROWS, 2, kept)
    assert [(job.number, job.task) for job in todo] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert len({job.key for job in todo}) == 6
    kept.add(todo[1].key, came(True))
    assert [job.key for job in jobs(ROWS, 2, kept)] == [job.key for i, job in enumerate(todo) if i != 1]
    groups = {job.row["uid"] for job in todo}
    assert len(groups) == 3, "samples of a task are a group in the log"


@pytest.mark.parametrize("concurrency", [1, 2, 100])
def test_no_more_at_once_than_asked_for(kept, concurrency):
    now, most = 0, 0

    async def play(key: str, row: Any) -> dict[str, Any]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return came(True)

    assert asyncio.run(play_all(jobs(ROWS, 2, kept), play, kept, concurrency=concurrency)) == []
    assert most == min(concurrency, 6)
    assert jobs(ROWS, 2, kept) == []


def test_a_failed_episode_is_played_again_and_then_left_out(kept):
    tries: dict[int, int] = {}
    sessions: list[Any] = []
    outcomes: list[bool | None] = []

    async def play(key: str, row: Any) -> dict[str, Any] | str:
        task = Task.from_json(row[COLUMN]).seed
        tries[task] = tries.get(task, 0) + 1
        sessions.append(row["session_id"])
        return "EnvironmentFailure: it died" if task == 1 or (task == 2 and tries[2] < ATTEMPTS) else came(task == 3)

    failures = asyncio.run(play_all(jobs(ROWS, 1, kept), play, kept, concurrency=1, advance=outcomes.append))
    assert tries == {1: ATTEMPTS, 2: ATTEMPTS, 3: 1}
    assert sessions == [0, "0-1", "0-2"] * 2 + [0], "each attempt has a key of its own in the log"
    assert [(failure["task"], failure["seed"], failure["reason"]) for failure in failures] == [
        (0, 1, "EnvironmentFailure: it died")
    ]
    assert outcomes == [None, False, True]
    numbers = finish(kept, ROWS, 1, failures)
    assert (numbers["samples"], numbers["failed"]["samples"], numbers["complete"]) == (2, 1, False)
    assert [task["solved"] for task in numbers["tasks"]] == [0, 0, 1]
    assert [job.task for job in jobs(ROWS, 1, kept)] == [0], "the next call tries it again"
    mark = {"name": "small-3", "sha256": "0" * 64}
    for panel in (None, mark):
        finish(kept, ROWS, 1, failures, panel)
        assert json.loads((kept.folder / RESULT).read_text())["panel"] == panel


def test_where_nothing_can_succeed_any_more_it_stops(kept):
    async def play(key: str, row: Any) -> str:
        return "the server is gone"

    def check() -> None:
        raise RuntimeError("it ended")

    with pytest.raises(RuntimeError, match="it ended"):
        asyncio.run(play_all(jobs(ROWS, 2, kept), play, kept, concurrency=3, check=check))
    assert kept.done == {}
