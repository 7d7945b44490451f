"""The commands of docs/sandboxes.md, and what it says of placeholders and keys."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from typer.testing import CliRunner

from verl_turnkey.envs.agents.base import AgentHandle
from verl_turnkey.envs.agents.command import CommandRunner
from verl_turnkey.envs.agents.harbor import HarborTask
from verl_turnkey.plugins.cli.main import app

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/sandboxes.md").read_text(encoding="utf-8")


def test_the_harbor_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    commands = re.findall(r"^turnkey (.*--harbor.*)$", PAGE, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        result = CliRunner().invoke(app, command.replace("data/", f"{tmp_path}/").split())
        assert result.exit_code == 0, result.output
    assert {len(pd.read_parquet(tmp_path / f"{name}.parquet")) for name in ("train", "val")} == {1}


def test_the_command_of_the_page_is_filled_in(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    agent: dict[str, Any] = yaml.safe_load(text)["turnkey"]["agent"]
    runner = CommandRunner(agent["run"], timeout=1.0, env=agent["env"], files=agent["files"])
    handle = AgentHandle("http://127.0.0.1:1/s/v1", "k", "policy")
    job = runner.job({"instruction": "-x"}, handle, tmp_path, tmp_path)
    assert job.command == ["my-agent", "--model=openai/policy", "--task=-x"]
    assert json.loads((tmp_path / "home/.config/my-agent.json").read_text()) == {"url": handle.base_url, "key": "k"}
    for name in re.findall(r"`([A-Z]+_[A-Z_]+)`", PAGE.split("The process has")[1].split("posts of rewards")[0]):
        assert name in job.env


def test_the_tree_of_the_page_is_that_of_the_example() -> None:
    (tree,) = re.findall(r"^```text\n(median/.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    paths = [ROOT / "examples/harbor" / line.split()[0] for line in tree.splitlines()]
    assert len(paths) == 5
    assert all(path.exists() for path in paths)
    assert HarborTask.load(str(paths[0].parent)).workdir == "/app"
