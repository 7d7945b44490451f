"""The page "Train the agent you have": its code and its commands run, and its tables are what the gateway does."""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from verl_turnkey.plugins.cli.check import dry_run
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.config.agent import STATES
from verl_turnkey.plugins.gateway.limits import PARAMETERS
from verl_turnkey.plugins.gateway.rehearsal import WHY

PAGE = (Path(__file__).parents[4] / "docs" / "your-agent.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
TRY, TRAIN = (shlex.split(text.replace("\\\n", " ")) for language, text in BLOCKS if language == "bash")
OUTPUT = next(text for language, text in BLOCKS if language == "text")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for language, text in BLOCKS:
        if language == "python":
            (tmp_path / text.split("\n")[0].removeprefix("# ")).write_text(text)
        if language == "json" and text.startswith("["):  # a list is a script; the other block is a body
            (tmp_path / "replies.json").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def section(heading: str) -> str:
    return PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def first_column(heading: str) -> set[str]:
    rows = re.findall(r"^\| (`.*?) \|", section(heading), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row)}


def test_the_agent_plays_its_task(folder: Path):
    assert TRY[:2] == ["turnkey", "agent"]
    done = CliRunner().invoke(app, TRY[1:])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(OUTPUT), done.stdout
    own = ["turnkey.agent.state=my_states.py:last_results" if "state=" in word else word for word in TRY]
    done = CliRunner().invoke(app, own[1:])
    assert done.exit_code == 0, done.output
    assert "state  5  reward  1" in done.stdout


def test_the_launch_line_passes_all_checks(
    folder: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    runpy.run_path(str(folder / "make_tasks.py"))
    assert len(pd.read_parquet("train.parquet")) == 64
    monkeypatch.setattr(sys, "argv", sys.argv)
    words = [word.replace("MODEL", str(model_dir)) for word in TRAIN[3:]]
    assert TRAIN[:3] == ["python", "-m", "verl.trainer.main_ppo"]
    assert dry_run([*words, "+turnkey/device=cpu"]) == 0
    assert "my_agent.py:play" in capsys.readouterr().out


def test_the_tables_are_what_the_gateway_does():
    assert first_column("States") == {*STATES, "module:function"}
    assert first_column("Rows") == set(WHY) | {"template", "boundary"}
    named = " ".join(re.findall(r"`([^`]+)`", section("Parameters")))
    refused = {row.name for row in PARAMETERS if row.treatment == "refused"}
    left_out = {"best_of", "functions", "function_call", "modalities", "conversation", "prompt", "output_config.format",
                "structured_outputs", *(name for name in refused if name.startswith("guided_"))}  # fmt: skip
    assert {name for name in refused - left_out if name not in named.split()} == set()
    assert "guided_*" in named
