"""The page "Own data": its environment, its commands and its files."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import gymnasium
import pandas as pd
import pytest
from typer.testing import CliRunner

from verl_turnkey.envs import make
from verl_turnkey.envs.rewards import RewardStep, compose
from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.cli.main import app

PAGE = (Path(__file__).parents[3] / "docs" / "own-data.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def quiz(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quiz.py").write_text(blocks("python")[0])
    (tmp_path / "questions.csv").write_text("question,answer\n2 + 2?,4\nH2O?,water\nCapital of France?,Paris\n")
    rows = [{"text": f"{n}?", "gold": [str(n)]} for n in range(12)]
    (tmp_path / "questions.jsonl").write_text("\n".join(map(json.dumps, rows)))
    yield
    gymnasium.registry.pop("my/Quiz-v0", None)


def test_the_commands_write_tasks_that_can_be_played_and_pay(quiz):
    for command in blocks("bash")[0].splitlines():
        done = CliRunner().invoke(app, shlex.split(command)[1:], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        row = pd.read_parquet("data/train.parquet").to_dict("records")[0]
        task = Task.from_json(row["turnkey_task"])
        observation, _ = make(task.env_id, task.kwargs).reset(seed=task.seed)
        assert observation == task.kwargs["question"]
        truth = row["reward_model"]["ground_truth"]
        step = RewardStep(observation, truth if isinstance(truth, str) else truth[0], row=row)
        assert compose([{"name": "answer"}])([step]).rewards == [1.0]


def test_the_row_of_two_columns_is_a_task():
    row = json.loads(blocks("json")[0])
    assert {*row} == {"prompt", "turnkey_task"}
    assert Task.from_json(row["turnkey_task"]) == Task("my/Quiz-v0", 1, {"question": "H2O?"})


def test_the_python_of_the_page_writes_a_file(quiz):
    exec(compile(blocks("python")[1], "own-data.md", "exec"), {})
    rows = pd.read_parquet("data/train.parquet").to_dict("records")
    assert [row["reward_model"]["ground_truth"].tolist() for row in rows] == [["water"], ["4", "four"]]
