"""The last action against the right answers of the task."""

from __future__ import annotations

import numpy as np
import pytest

from verl_turnkey.advantage import ConfigError
from verl_turnkey.envs.rewards import RewardError, RewardStep, compose, right_answers

GOLDS = ["The Netherlands", "Holland"]


def value(action: str | None, **options: object) -> float:
    steps = [RewardStep("q", "search", extra={"gold_answers": GOLDS}), RewardStep("found", action)]
    first, last = compose([{"name": "answer", **options}])(steps).rewards
    assert first == 0
    return last


@pytest.mark.parametrize(
    ("action", "options", "expected"),
    [
        ("netherlands.", {}, 1.0),
        ("holland", {}, 1.0),
        ("in Holland", {}, 0.0),
        (None, {}, 0.0),
        ("", {}, 0.0),
        ("in Holland", {"match": "f1"}, 2 / 3),
        (None, {"match": "f1"}, 0.0),
        ("answer: Denmark; answer: Holland", {"pattern": r"answer: (\w+)"}, 1.0),
        ("Holland", {"pattern": r"answer: (\w+)"}, 0.0),
    ],
)
def test_answers(action, options, expected):
    assert value(action, **options) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("extra", "truth", "expected"),
    [
        ({"gold_answers": ["a", "b"], "gold_answer": "c"}, "d", ["a", "b"]),
        ({"gold_answer": "c"}, "d", ["c"]),
        ({}, "d", ["d"]),
        ({}, 42, ["42"]),
        ({}, ["d", "e"], ["d", "e"]),
        ({}, {"target": np.array(["d", "e"], dtype=object)}, ["d", "e"]),
        ({"gold_answers": []}, "d", ["d"]),
    ],
)
def test_where_right_answers_are(extra, truth, expected):
    row = {"reward_model": {"ground_truth": truth}}
    assert right_answers(RewardStep("q", None, extra=extra, row=row)) == expected


@pytest.mark.parametrize("row", [{}, {"reward_model": {"ground_truth": ""}}, {"reward_model": {"ground_truth": {}}}])
def test_a_task_without_one(row):
    with pytest.raises(RewardError, match=r"no right answer: expected info\['extra'\]\['gold_answers'\]"):
        compose([{"name": "answer"}])([RewardStep("q", "x", row=row)])


@pytest.mark.parametrize("pattern", ["(", "no group"])
def test_a_pattern_that_is_none(pattern):
    with pytest.raises(ConfigError, match=r"pattern: expected a regular expression with a group"):
        compose([{"name": "answer", "pattern": pattern}])
