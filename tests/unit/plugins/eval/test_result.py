"""What samples come to: against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import pytest

from verl_turnkey.plugins.eval.result import powers, remarks, result, rows
from verl_turnkey.plugins.view import stats

TASKS = [{"env_id": "e", "seed": seed, "kwargs": {}} for seed in (5, 6, 7)]


def sample(success: bool, turns: int = 2) -> dict[str, Any]:
    zeros = dict.fromkeys(("env_return", "composed_return", "invalid_rate", "unparsed_rate"), 0.0)
    return {
        **zeros,
        "success": success,
        "turns": turns,
        "truncated": not success,
        "tokens": 3,
        "composed_return.step": 0.5,
    }


def of(*solved: int, samples: int = 4) -> dict[int, list[dict[str, Any]]]:
    return {task: [sample(i < c, turns=task + 1) for i in range(samples)] for task, c in enumerate(solved)}


def test_success_and_pass_at_k():
    numbers = result(of(0, 1, 4), [], tasks=TASKS, samples_per_task=4)
    assert numbers["complete"]
    assert (numbers["samples"], numbers["samples_per_task"]) == (12, 4)
    low, high = stats.success([0, 1, 4], 4)[1:]
    assert numbers["success"] == pytest.approx({"value": 5 / 12, "low": low, "high": high})
    values = {k: rate["value"] for k, rate in numbers["pass_at"].items()}
    assert values == pytest.approx({"1": 5 / 12, "2": (0 + 0.5 + 1) / 3, "4": 2 / 3})
    assert numbers["turns"]["value"] == pytest.approx(2.0)
    assert numbers["truncated"]["value"] == pytest.approx(7 / 12)
    assert numbers["composed_return.step"]["value"] == 0.5
    assert [(task["seed"], task["solved"], task["samples"]) for task in numbers["tasks"]] == [
        (5, 0, 4),
        (6, 1, 4),
        (7, 4, 4),
    ]


def test_failed_samples_are_in_no_number_and_make_it_incomplete():
    samples = of(4, 4, 4)
    del samples[2][1:], samples[1]
    failures = [{"task": 1, "reason": "EnvironmentFailure: environment failure (timeout): slow"}] * 4
    failures += [{"task": 2, "reason": "ServerError: gone"}] * 3
    numbers = result(samples, failures, tasks=TASKS, samples_per_task=4)
    assert not numbers["complete"]
    assert numbers["success"]["value"] == 1.0
    assert {k: (rate["value"], rate["tasks"]) for k, rate in numbers["pass_at"].items()} == {
        "1": (1.0, 2),
        "2": (1.0, 1),
        "4": (1.0, 1),
    }
    assert numbers["failed"]["samples"] == 7
    assert numbers["failed"]["share"] == pytest.approx(7 / 12)
    assert numbers["failed"]["kinds"] == {"timeout": 4, "ServerError": 3}
    assert [task["samples"] for task in numbers["tasks"]] == [4, 0, 1]
    text = "\n".join(remarks(numbers))
    for words in ("3 tasks", "7 samples failed", "58.3 %", "ServerError: gone", "INCOMPLETE"):
        assert words in text


@pytest.mark.parametrize(("failed", "complete"), [(0, True), (1, True), (2, False)])
def test_one_failed_sample_in_a_hundred_is_borne(failed, complete):
    samples = {0: [sample(True)] * (100 - failed)}
    numbers = result(samples, [{"task": 0, "reason": "x"}] * failed, tasks=TASKS[:1], samples_per_task=100)
    assert numbers["complete"] is complete


def test_samples_that_were_not_played_make_it_incomplete():
    numbers = result({0: [sample(True)]}, [], tasks=TASKS, samples_per_task=1)
    assert not numbers["complete"]
    assert "failed" not in "\n".join(remarks(numbers))


def test_nothing_played_has_no_numbers():
    numbers = result({}, [], tasks=TASKS, samples_per_task=2)
    assert numbers["success"] is None
    assert numbers["pass_at"] == {}
    assert rows(numbers) == []


def test_the_table_has_shares_in_percent():
    lines = {
        what: (value, interval)
        for what, value, interval in rows(result(of(2, 2, 2), [], tasks=TASKS, samples_per_task=4))
    }
    assert lines["success"][0] == "50.0 %"
    assert "pass@1" not in lines, "it is the success"
    assert lines["pass@4"][0] == "100.0 %"
    assert lines["turns"] == ("2", "1 to 3")
    assert "composed return: step" not in lines, "the only component is the reward"


@pytest.mark.parametrize(("n", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_k_are_the_powers_of_two_and_the_samples(n, expected):
    assert powers(n) == expected
