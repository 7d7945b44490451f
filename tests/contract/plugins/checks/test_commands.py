"""Every command of the pages and of ``--help`` is run here, or stands in ``tests/data/commands.yaml`` with a reason."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import pandas as pd
import pytest
import typer
import yaml
from contract_tools import driven
from launch_lines import BASE, filled, write_files
from typer.testing import CliRunner

from verl_turnkey.envs.tasks import Task
from verl_turnkey.plugins.cli.main import app

ROOT = Path(__file__).parents[4]
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
TABLE = yaml.safe_load((ROOT / "tests" / "data" / "commands.yaml").read_text(encoding="utf-8"))


def all_commands(group: Any, name: str = "") -> dict[str, Any]:
    """Every command by its words, such as ``prm data``."""
    commands = {}
    for own, command in group.commands.items():
        words = f"{name} {own}".strip()
        commands |= all_commands(command, words) if hasattr(command, "commands") else {words: command}
    return commands


COMMANDS = all_commands(typer.main.get_command(app))
LAUNCH = "python -m verl.trainer.main_ppo"


def of_block(block: str) -> list[str]:
    """The commands of a block, each on a line; where some follow a prompt, the others are output."""
    lines = block.replace("\\\n", " ").splitlines()
    prompted = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    commands = [" ".join(line.split()) for line in prompted or lines]
    return [command for command in commands if command and not command.startswith("#")]


def documented() -> Iterator[tuple[str, str]]:
    """Page or command, and a command that it shows."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^ *```(?:bash|sh|shell|console)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
            yield from ((str(page.relative_to(ROOT)), command) for command in of_block(block))
    for name, command in COMMANDS.items():
        examples = re.findall(r"^\s*(turnkey .*)$", command.help or "", re.MULTILINE)
        yield from ((f"turnkey {name} --help", re.split(r" {2,}", line)[0]) for line in examples)


DOCUMENTED = list(dict.fromkeys(documented()))


def reason(command: str, kind: str) -> str | None:
    """Why the table has it; ``kind``: of ``not_run``, or ``parsed``, whose options are read all the same."""
    return next((why for start, why in TABLE[kind].items() if command.startswith(start)), None)


RUN = [row for row in DOCUMENTED if not any(reason(row[1], kind) for kind in ("not_run", "parsed"))]


@pytest.fixture(scope="module")
def home(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands name."""
    folder = tmp_path_factory.mktemp("commands")
    files = write_files(folder, model_dir)
    shutil.copytree(model_dir, folder / "MODEL")
    (folder / "tasks").mkdir()
    (folder / "runs" / "babyai").mkdir(parents=True)
    (folder / "runs" / "babyai" / "tasks").symlink_to(folder / "tasks")
    for split in ("train", "val"):
        rows = pd.concat([pd.read_parquet(folder / f"{split}.parquet")] * 2, ignore_index=True).assign(
            skill="look first", turnkey_hint="look"
        )
        rows["turnkey_task"] = [Task("", seed).to_json() for seed in range(len(rows))]  # of the line's environment
        for file in (folder / f"{split}.parquet", folder / "tasks" / f"{split}.parquet"):
            rows.to_parquet(file)
    shutil.copy(folder / "val.parquet", folder / "babyai-48.parquet")
    shutil.copy(folder / "reward.py", folder / "my_reward.py")
    (folder / "examples.yaml").write_text('[{observation: "You see a red ball ahead.", action: "pick up"}]')
    (folder / "base").write_text(filled(BASE, files))
    return folder


@pytest.fixture
def here(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(home)
    registered = dict(gymnasium.registry)
    yield home
    gymnasium.registry.clear()
    gymnasium.registry.update(registered)


def words_of(command: str) -> list[str]:
    """Without comments, and without the dots that stand for the user's own words."""
    return [word for word in shlex.split(command, comments=True) if word != "..."]


def turnkey(words: list[str]) -> str:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(("page", "command"), RUN, ids=[f"{page}: {command[:60]}" for page, command in RUN])
def test_it_runs(here: Path, tmp_path: Path, page: str, command: str) -> None:
    words = words_of(command)
    further = next((shlex.split(more) for start, more in TABLE["with"].items() if command.startswith(start)), [])
    if command.startswith("turnkey train"):
        line = turnkey([*words[1:], *further, "--print", "--train", "16", "--val", "4", "--out", str(tmp_path / "run")])
        words = shlex.split(line[line.index(LAUNCH) :].replace("\\\n", " "))
        driven([*words[3:], "turnkey.env.probe=false"])
    elif command.startswith(("turnkey check", LAUNCH)) or "=" in words[0]:
        overrides = [*further, *words[2 if words[0] == "turnkey" else 3 if words[0] == "python" else 0 :]]
        method = [] if any(word.startswith("+turnkey=") for word in overrides) else ["+turnkey=gigpo"]
        keys = {word.lstrip("+").partition("=")[0] for word in overrides}
        base = [word for word in shlex.split(Path("base").read_text()) if word.partition("=")[0] not in keys]
        played = [] if "+turnkey/env=" in command else ["turnkey.env.id=turnkey/MiniGrid-v0"]
        driven([*method, *overrides, *base, *played, "turnkey.env.probe=false"])
    elif words[0] == "turnkey":
        turnkey([*words[1:], *further])
    else:
        pytest.fail("run it here, or give the reason in tests/data/commands.yaml")


PARSED = [command for _, command in DOCUMENTED if reason(command, "parsed") and not reason(command, "not_run")]


@pytest.mark.parametrize("command", PARSED)
def test_its_options_exist(command: str) -> None:
    _, *words = words_of(command)
    number = 1 if words[0] in COMMANDS else 2
    name = " ".join(words[:number])
    COMMANDS[name].make_context(name, words[number:])


def test_the_table_has_no_command_that_is_gone() -> None:
    starts = [start for kind in ("not_run", "parsed", "with") for start in TABLE[kind]]
    assert [start for start in starts if not any(command.startswith(start) for _, command in DOCUMENTED)] == []


def test_a_command_that_nobody_listed_fails() -> None:
    (command,) = of_block("# a comment\n\nnever_listed \\\n    --now\n")
    assert command == "never_listed --now"
    assert not any(reason(command, kind) for kind in ("not_run", "parsed"))
