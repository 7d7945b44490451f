"""The command ``turnkey``: its list of commands, and what it refuses before it writes anything."""

import json
import os
import re
import shlex
import sys
from collections.abc import Callable

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.cli import doctor, launch
from verl_turnkey.plugins.cli.doctor import Report, _show, one_per_name
from verl_turnkey.plugins.cli.main import SECTIONS, app, main

LAKE = "turnkey/FrozenLake-v0"


def test_help_shows_every_command_under_a_heading_with_its_whole_summary():
    commands = typer.main.get_command(app).commands
    text = CliRunner().invoke(app, ["--help"], terminal_width=80).output
    lines = re.findall(r"^  ([a-z][a-z-]*) +(\S.*)$", text, re.MULTILINE)
    assert dict(lines) == {name: command.get_short_help_str(1000) for name, command in commands.items()}
    assert len(lines) == len(commands)
    assert lines[0][0] == "train"
    assert re.findall(r"^(\w.*):$", text, re.MULTILINE) == ["Options", *SECTIONS]


@pytest.mark.parametrize("command", [[], ["check"], ["train"], ["list"], ["list", "methods"], ["report", "write"]])
def test_the_short_option_is_the_long_one(command):
    short, long = (CliRunner().invoke(app, [*command, option], prog_name="turnkey") for option in ("-h", "--help"))
    assert short.exit_code == long.exit_code == 0
    assert short.output == long.output
    assert command[-1:] == [] or f"turnkey {' '.join(command)}" in short.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--method", "grpo"], "no method 'grpo'; here, grpo is grpo_steps: +turnkey=grpo_steps"),
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
    existing = f"using the existing tasks in {tmp_path}/run/tasks"
    assert again.stderr == f"{existing} (--train and --val ignored)\n"
    no_numbers = [word for word in small if word not in ("--train", "--val", "1")]
    assert CliRunner().invoke(app, ["train", "frozenlake", *no_numbers]).stderr == f"{existing}\n"
    one_number = CliRunner().invoke(app, ["train", "frozenlake", *no_numbers, "--val", "8"])
    assert one_number.stderr == f"{existing} (--val ignored)\n"


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
            "train.parquet holds tasks with size=5, which",
        ),
        ("babyai", {"level": "MiniGrid-DoorKey-5x5-v0", "max_steps": 20}, [], None),
        ("search", None, [], None),
        ("search", None, ["turnkey.env.kwargs.split=all"], "val.parquet holds tasks with split='test', which"),
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
    done = CliRunner().invoke(app, [*words, *line])
    if message is None:
        assert done.stdout.startswith("python -m"), done.exception
        assert done.exit_code == 0
    else:
        assert isinstance(done.exception, ConfigError)
        assert message in str(done.exception)
        assert line == [] or f"which override {line[0]}: choose" in str(done.exception)


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    """``refused(*words)``: what ``turnkey`` says on stderr of words that it refuses, in an empty folder."""

    def run(*words: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["turnkey", *words])
        with pytest.raises(SystemExit, match=r"^2$"):
            main()
        return capsys.readouterr().err

    return run


def test_errors_of_servers_are_one_line(refused):
    (line,) = refused("panel", "mine", "turnkey/WebShop-v0", "turnkey.env.kwargs.url=http://127.0.0.1:9").splitlines()
    assert line.startswith("turnkey: the server at http://127.0.0.1:9")


@pytest.mark.parametrize(
    "agent", ["turnkey.agent.run=my_agent.py:play", "turnkey.agent.run=[my-agent, --go]", "+turnkey/agent=pi"]
)
def test_train_says_how_an_agent_is_trained(refused, agent):
    error = " ".join(refused("train", agent, "--model", "m", "--method", "hgpo").split())
    assert f"takes an environment, and {agent} is an agent" in error
    line = f"python -m verl.trainer.main_ppo +turnkey=hgpo {shlex.quote(agent)} data.train_files=..."
    assert f"{line} (docs/your-agent.md)" in error


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
def test_a_module_is_advised_by_the_option_of_the_command(tmp_path, refused, command, module):
    errors = refused(*command, "absent/Env-v0", *module)
    assert "--module: cannot import 'absent_xyz.py'" in errors if module else "my_env.py:ID" in errors
    assert os.listdir(tmp_path) == []


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


# --- what ``turnkey doctor`` makes of what it found; the looking itself is a contract test ----------------------------


def point(kind: str, name: str, status: str) -> dict[str, str]:
    return {"kind": kind, "name": name, "status": status, "detail": ""}


POINTS = [
    point("estimator", "gigpo", "registered"),
    point("estimator", "turnkey/gigpo", "registered"),
    point("estimator", "salt", "clash"),
    point("estimator", "turnkey/salt", "registered"),
    point("loss", "psft", "missing"),
    point("loss", "turnkey/psft", "missing"),
]


def test_one_row_per_name_and_one_more_where_the_second_name_fares_otherwise():
    assert [p["name"] for p in one_per_name(POINTS)] == ["gigpo", "salt", "turnkey/salt", "psft"]


def test_problems_are_named():
    report = Report(
        "here",
        points=POINTS,
        plugins=[point("plugin of verl", "theirs", "failed"), point("own package", "ours", "loaded")],
        seams=["verl.x.y is gone (used for: z)"],
        broken_imports={"verl.a": "..."},
    )
    assert report.problems == [
        "loss psft is missing",
        "plugin of verl theirs failed to load",
        "verl changed: verl.x.y is gone",
        "verl.a cannot be imported",
    ]


def test_it_fits_a_screen_of_80_columns_and_names_what_is_wrong(capsys):
    names = [f"method_{i}" for i in range(40)]
    points = [point("estimator", name, "registered") for name in names]
    points += [point("loss", "psft", "failed") | {"detail": "Traceback\nImportError: no"}, *POINTS[2:3]]
    _show(Console(width=80), Report("a place", points=points))
    text = capsys.readouterr().out
    assert len(text.splitlines()) < 20
    assert max(map(len, text.splitlines())) <= 80
    parts = [*names, "40 registered", "loss psft: failed. ImportError: no", "estimator salt: clash."]
    assert [part for part in parts if part not in text] == []


def test_json_is_for_scripts(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "inspect_process", lambda place: Report(place, points=POINTS))
    assert doctor.run(in_ray=False, address=None, as_json=True) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["problems"] == ["this process: loss psft is missing"]
    assert {row["package"] for row in result["versions"]} >= {"verl", "torch"}
    assert result["places"][0]["points"] == POINTS
