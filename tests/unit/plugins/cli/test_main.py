"""The command ``turnkey``: its list of commands, and what it refuses before it writes anything."""

import json
import os
import re
import sys

import pytest
import typer
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.cli import launch, tables
from verl_turnkey.plugins.cli.main import SECTIONS, app, main

LAKE = "turnkey/FrozenLake-v0"


def test_help_shows_at_most_16_commands_under_headings_with_whole_summaries():
    group = typer.main.get_command(app)
    text = CliRunner().invoke(app, ["--help"], terminal_width=80).output
    lines = re.findall(r"^  ([a-z][a-z-]*) +(\S.*)$", text, re.MULTILINE)
    assert dict(lines) == {name: command.get_short_help_str(1000) for name, command in group.commands.items()}
    assert len(lines) <= 16
    assert lines[0][0] == "train"
    assert re.findall(r"^(\w.*):$", text, re.MULTILINE) == ["Options", *SECTIONS]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "grpo"], "no method 'grpo'; grpo is grpo_steps here: +turnkey=grpo_steps"),
        (["turnkey.rollout.histori=3"], "turnkey.rollout.histori: unknown key"),
    ],
)
def test_train_refuses_a_line_before_it_writes_tasks(tmp_path, arguments, words):
    small = ["--model", "m", "--device", "cpu", "--train", "1", "--val", "1", "--print", "--out", str(tmp_path / "run")]
    done = CliRunner().invoke(app, ["train", "frozenlake", *small, *arguments])
    assert words in str(done.exception)
    assert not (tmp_path / "run").exists()
    done = CliRunner().invoke(app, ["train", "frozenlake", *small], catch_exceptions=False)
    assert (tmp_path / "run" / "tasks" / "val.parquet").is_file()
    comment = f"# 1 training and 1 validation tasks of turnkey/FrozenLake-v0 in {tmp_path}/run/tasks\n"
    assert done.stdout.startswith(f"{comment}python -m verl.trainer.main_ppo")
    again = CliRunner().invoke(app, ["train", "frozenlake", *small], catch_exceptions=False)
    assert again.stdout.startswith("python -m")
    assert "--train and --val are for new ones" in again.stderr


@pytest.mark.parametrize(
    ("environment", "written", "line", "message"),
    [
        ("frozenlake", {"size": 5}, [], None),
        ("frozenlake", {"size": 5}, ["turnkey.env.kwargs.size=5"], None),
        ("frozenlake", {"size": 5}, ["turnkey.env.kwargs.slippery=true"], None),
        (
            "frozenlake",
            {"size": 5},
            ["turnkey.env.kwargs.size=6"],
            "train.parquet holds tasks with size=5, which override turnkey.env.kwargs.size=6",
        ),
        ("babyai", {"level": "MiniGrid-DoorKey-5x5-v0", "max_steps": 20}, [], None),
        ("search", None, [], None),
        (
            "search",
            None,
            ["turnkey.env.kwargs.split=all"],
            "val.parquet holds tasks with split='test', which override turnkey.env.kwargs.split=all",
        ),
        ("search", {"split": "all"}, [], None),
        ("search", {}, [], "val.parquet lack the arguments of their split, turnkey.env.kwargs.split=test"),
        ("search", {}, ["turnkey.env.kwargs.split=all"], None),
    ],
)
def test_tasks_that_exist(tmp_path, environment, written, line, message):
    """``written``: what ``turnkey tasks`` wrote; None: ``turnkey train`` wrote them."""
    folder, sizes = str(tmp_path / "tasks"), ["--train", "2", "--val", "2"]
    words = ["train", environment, "--model", "m", "--device", "cpu", *sizes, "--print", "--tasks", folder]
    if written is None:
        first = words
    else:
        id = launch.resolve(environment).id
        first = ["tasks", folder, "--env", id, *sizes, "--kwargs", json.dumps(written)]
    assert CliRunner().invoke(app, first, catch_exceptions=False).exit_code == 0
    if message is None:
        done = CliRunner().invoke(app, [*words, *line], catch_exceptions=False)
        assert done.stdout.startswith("python -m")
    else:
        with pytest.raises(ConfigError, match=message):
            CliRunner().invoke(app, [*words, *line], catch_exceptions=False)


def test_errors_of_servers_are_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    url = "turnkey.env.kwargs.url=http://127.0.0.1:9"
    monkeypatch.setattr(sys, "argv", ["turnkey", "panel", "mine", "turnkey/WebShop-v0", url])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("turnkey: the server at http://127.0.0.1:9")


@pytest.mark.parametrize("option", ["--train", "--val"])
def test_no_folder_without_tasks_in_it(tmp_path, option):
    counts = {"--train": "2", "--val": "2", option: "0"}
    words = [word for pair in counts.items() for word in pair]
    done = CliRunner().invoke(app, ["tasks", str(tmp_path / "t"), "--env", LAKE, *words])
    assert done.exit_code == 2
    assert option in done.output
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("command", [["tasks", "OUT", "--env"], ["env-check", "--processes", "0"]])
@pytest.mark.parametrize("module", [[], ["--module", "absent_xyz.py"]])
def test_a_module_is_advised_by_the_option_of_the_command(tmp_path, monkeypatch, capsys, command, module):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["turnkey", *command, "absent/Env-v0", *module])
    with pytest.raises(SystemExit) as exit:
        main()
    assert exit.value.code == 2
    errors = capsys.readouterr().err
    assert "--module: cannot import 'absent_xyz.py'" in errors if module else "by --module in the commands" in errors
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("command", ["methods", "modifiers", "losses", "keys", "envs", "presets"])
def test_lists_are_for_a_terminal_for_a_page_or_json_for_scripts(command):
    output = CliRunner().invoke(app, ["list", command], catch_exceptions=False).output
    page = CliRunner().invoke(app, ["list", command, "--markdown"], catch_exceptions=False).output
    assert page.startswith("| ")
    assert "|---|" in page
    assert "|" not in output
    assert max(map(len, output.splitlines())) <= 190
    rows = json.loads(CliRunner().invoke(app, ["list", command, "--json"], catch_exceptions=False).output)
    page = CliRunner().invoke(app, ["list", command, "--markdown"], catch_exceptions=False).output
    assert len(rows) == len(page.splitlines()) - 2
    assert all(row.keys() == rows[0].keys() for row in rows)


def test_environments_fit_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(app, ["list", "envs"], catch_exceptions=False).output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "turnkey/ALFWorld-v0  +turnkey/env=alfworld" in lines
    assert len(lines) < 90


def test_a_preset_is_shown_with_switches_values_and_sources():
    output = CliRunner().invoke(app, ["list", "presets", "gigpo_webshop_7b"], catch_exceptions=False).output
    assert "+turnkey=gigpo +turnkey/env=webshop +turnkey/preset=gigpo_webshop_7b" in output
    assert re.search(r"turnkey\.credit\.gamma +0\.95 ", output)
    assert "paper: GiGPO, arXiv:2505.10978" in output
    page = CliRunner().invoke(app, ["list", "presets", "gigpo_webshop_7b", "--markdown"], catch_exceptions=False).output
    assert "| `turnkey.credit.gamma` | `0.95` |" in page
    unknown = CliRunner().invoke(app, ["list", "presets", "gigpo_webshp_7b"])
    assert unknown.exit_code == 2
    assert "did you mean 'gigpo_webshop_7b'?" in unknown.output


def test_a_narrow_terminal_shows_the_whole_table():
    markdown = tables.methods()
    narrow = tables.on_terminal(markdown, 80)
    assert max(map(len, narrow.splitlines())) <= 80
    assert "…" not in narrow
    assert all(f" +turnkey={name} " in narrow for name in tables.shipped())
    wide = tables.on_terminal(markdown, 400)
    row = next(line for line in wide.splitlines() if "+turnkey=rebn " in line)
    assert "normalizes each step" in row
    assert "arXiv:2510.01051" in row
    assert "gamma=0.9, std=sample, epsilon=1.0e-09" in wide


@pytest.mark.parametrize(
    ("logger", "folders"),
    [("[console,wandb]", ["WANDB_DIR"]), ("tensorboard", ["TENSORBOARD_DIR"]), ("null", []), ("[file]", [])],
)
def test_loggers_write_into_the_folder_of_the_run(tmp_path, logger, folders):
    small = ["--model", "m", "--device", "cpu", "--train", "1", "--val", "1", "--print", "--out", str(tmp_path)]
    line = [f"trainer.logger={logger}"]
    done = CliRunner().invoke(app, ["train", "frozenlake", *small, *line], catch_exceptions=False)
    named = [name for name in ("WANDB_DIR", "TENSORBOARD_DIR") if f"env_vars.{name}={tmp_path}" in done.output]
    assert named == folders
