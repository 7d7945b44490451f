"""Contrastive rewards: the baseline of a task from the data row or from a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from verl_turnkey.advantage.params import ConfigError
from verl_turnkey.envs.rewards import RewardError, RewardStep, compose
from verl_turnkey.plugins.log.writer import Tables

PAGE = (Path(__file__).parents[4] / "docs" / "rewards.md").read_text(encoding="utf-8")


def shaped(row, **options):
    steps = [RewardStep("", "a", row=row), RewardStep("", "b", reward=1.0, row=row)]
    return compose([{"name": "step"}, {"name": "contrastive", **options}])(steps).rewards


@pytest.mark.parametrize("stored", [[0, 1, 0.5], np.array([0.5, 0.5]), 0.5, np.float64(0.5)])
def test_from_a_field_of_the_data_row(stored):
    assert shaped({"extra_info": {"baseline_rewards": stored}}) == [0.0, 0.5]
    assert shaped({"before": stored}, field="before", weight=2) == [0.0, 0.0]


def test_from_a_file(tmp_path):
    (tmp_path / "b.json").write_text(json.dumps({"one": [0.2, 0.4], "7": 1}))
    file = str(tmp_path / "b.json")
    assert shaped({"turnkey_task": "one"}, file=file) == pytest.approx([0.0, 0.7])
    assert shaped({"extra_info": {"index": 7}}, file=file, key="extra_info.index") == [0.0, 0.0]
    with pytest.raises(RewardError, match=r"b\.json, task two: expected a number or a list of numbers, got None"):
        shaped({"turnkey_task": "two"}, file=file)


def test_a_task_without_a_baseline(tmp_path):
    """Such as one of validation: an error that names the way out, or the number that is given for it."""
    (tmp_path / "b.json").write_text(json.dumps({"one": 0.25}))
    for options in ({"file": str(tmp_path / "b.json")}, {}):
        with pytest.raises(RewardError, match=r"got None; the option missing is the baseline of tasks without one"):
            shaped({"turnkey_task": "two"}, **options)
        assert shaped({"turnkey_task": "two"}, missing=0.5, **options) == [0.0, 0.5]
    assert shaped({"turnkey_task": "one"}, file=str(tmp_path / "b.json"), missing=0.5) == [0.0, 0.75]
    with pytest.raises(RewardError, match=r"got \[\]$"):
        shaped({"extra_info": {"baseline_rewards": []}}, missing=0.5)
    with pytest.raises(ConfigError, match=r"missing: expected a finite number"):
        shaped({}, missing=float("nan"))


@pytest.mark.parametrize("stored", [None, [], [0.5, None], "0.5", [True], [float("nan")]])
def test_what_is_no_baseline_costs_the_episode(stored):
    with pytest.raises(RewardError, match=r"extra_info\.baseline_rewards of the data row: expected a number"):
        shaped({"extra_info": {"baseline_rewards": stored}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"rewards\[1\]\.file: .* cannot be read \(FileNotFoundError"),
        ("{", r"\.file: .* cannot be read \(JSONDecodeError"),
        ("[1]", r"\.file: expected a JSON object from tasks to rewards, got 'list'"),
        ("{}", r"\.file: expected a JSON object with at least one task"),
    ],
)
def test_a_file_that_is_none_is_an_error_at_the_start(tmp_path, text, message):
    if text is not None:
        (tmp_path / "b.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        shaped({}, file=str(tmp_path / "b.json"))


def test_the_script_of_the_page(tmp_path):
    """It reads the validation of a trajectory log; failed episodes do not count."""
    log = Tables(tmp_path, "20260102T030405_00ff", "p")
    played = [(0.75, None, True), (None, "x", True), (2.0, None, True), (9.0, None, False)]
    for n, (score, failed, validation) in enumerate(played):
        row = {"episode": f"u_{n}", "task": "one", "composed_return": score, "failed": failed, "validation": validation}
        log.put("episodes", 1, {name: [value] for name, value in row.items()})
    assert log.drain(30.0)
    [script] = [block for block in PAGE.split("```python\n") if block.startswith("# baseline.py")]
    names: dict = {"__name__": "baseline"}
    exec(script.split("```")[0], names)
    assert names["baseline"](tmp_path) == {"one": [0.75, 2.0]}
