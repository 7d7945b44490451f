"""One name for an environment in every command: a short name, a gymnasium id, a file, a file and an id."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gymnasium
import pytest
import typer
from typer.testing import CliRunner

from verl_turnkey.envs import UnknownEnvironmentError
from verl_turnkey.envs.catalog import ADAPTERS
from verl_turnkey.envs.tasks import open_parquet
from verl_turnkey.plugins.cli import evaluate, launch
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.config.overrides import values

CUSTOM = Path(__file__).parents[4] / "examples" / "custom_env.py"
LAKE, SIZES = "turnkey/FrozenLake-v0", ["--train", "2", "--val", "2"]
ENV_OF_NAME = {
    "frozenlake": LAKE,
    "frozen_lake": LAKE,
    LAKE: LAKE,
    "taxi": "turnkey/Taxi-v0",
    "cliff_walking": "turnkey/CliffWalking-v0",
    "minigrid": "turnkey/MiniGrid-v0",
    "cards": "turnkey/Points24-v0",
    "number_line": "turnkey/NumberLine-v0",
    "mine.py": "names/Guess-v0",
    "mine.py:names/Guess-v0": "names/Guess-v0",
    "two.py:names/A-v0": "names/A-v0",
    f"two.py:{LAKE}": LAKE,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with files that register none, one and two environments."""
    monkeypatch.chdir(tmp_path)
    text = CUSTOM.read_text(encoding="utf-8")
    Path("none.py").write_text("x = 1\n")
    Path("mine.py").write_text(text.replace("example/GuessNumber-v0", "names/Guess-v0"))
    first = text.replace("example/GuessNumber-v0", "names/A-v0")
    Path("two.py").write_text(f"{first}\ngymnasium.register('names/B-v0', entry_point='x:y')\n")
    yield tmp_path
    for env_id in [env_id for env_id in gymnasium.registry if env_id.startswith("names/")]:
        del gymnasium.registry[env_id]


def ran(*words: str) -> str:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def by_train(name: str) -> str:
    ran("train", name, "--model", "m", "--device", "cpu", "--print", "--out", "run", *SIZES)
    return by_file("run/tasks")


def by_tasks(name: str) -> str:
    ran("tasks", "data", "--env", name, *SIZES)
    return by_file("data")


def by_file(folder: str) -> str:
    (cell, _) = open_parquet(Path(folder, "val.parquet")).read().column("turnkey_task").to_pylist()
    return json.loads(cell)["env_id"]


def by_env_check(name: str) -> str:
    small = ["--seeds", "1", "--rollouts", "2", "--steps", "2", "--processes", "0"]
    done = CliRunner().invoke(app, ["env-check", name, *small, "--json"], catch_exceptions=False)
    return json.loads(done.stdout)["env"]["id"]


def by_panel(name: str) -> str:
    ran("panel", "made", name, "--tasks", "2", "--no-starts")
    return json.loads(Path("made.json").read_text())["environment"]["id"]


def by_eval(name: str) -> str:
    evaluations: list[evaluate.Evaluation] = []

    def checked(evaluation: evaluate.Evaluation) -> None:
        evaluations.append(evaluation)
        raise typer.Exit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate.Evaluation, "checked", checked)
        patch.setattr(launch, "device_here", lambda: ("gpu", 1))
        ran("eval", name, "--server", "http://127.0.0.1:1/v1", "--model", "m")
    return evaluations[0].environment.id


@pytest.mark.parametrize(
    ("name", "command"),
    [
        *((name, command) for name in ENV_OF_NAME for command in (by_train, by_tasks, by_env_check, by_eval)),
        *((name, by_panel) for name in ("frozen_lake", "two.py:names/A-v0")),  # slow, and by the function of train
    ],
)
def test_each_command_takes_each_name(name, command):
    assert command(name) == ENV_OF_NAME[name]


def test_each_environment_of_ours_has_a_short_name():
    for adapter in ADAPTERS:
        assert launch.environment(adapter.name.lower()).id == adapter.id
        assert launch.environment(adapter.recipe or adapter.id).id == adapter.id


def test_a_short_name_brings_the_arguments_of_its_recipe_and_an_id_none():
    assert launch.environment("sokoban").kwargs["game"] == "Sokoban-v0-easy"
    assert launch.environment("turnkey/GEM-v0") == launch.Played("turnkey/GEM-v0")
    assert launch.resolve("turnkey/GEM-v0") == launch.resolve("sokoban")
    report = ran("env-check", "gymnasium", "--seeds", "1", "--rollouts", "2", "--steps", "2", "--processes", "0")
    assert report.startswith('turnkey/Gymnasium-v0 {"env": "CartPole-v1"}')


@pytest.mark.parametrize("name", ["cards", "turnkey/Points24-v0", "taxi"])
def test_an_id_on_the_line_is_what_the_tasks_play(name):
    """The recipe's other settings stay: one recipe serves the games of a family."""
    chosen, before = "turnkey/NumberLine-v0", launch.resolve(name)
    assert launch.resolve(name, [f"turnkey.env.id={chosen}"]) == replace(before, id=chosen)
    assert launch.resolve(name, ["turnkey.env.id=null"]) == before
    line = ran(
        "train", name, "--model", "m", "--device", "cpu", "--print", "--out", "run", *SIZES, f"turnkey.env.id={chosen}"
    )
    assert by_file("run/tasks") == chosen
    assert ("+turnkey/env=cards" in line) == (name != "taxi")


@pytest.mark.parametrize("name", ["frozenlake", "search"])
def test_tasks_by_a_short_name_are_those_that_train_writes(name):
    ran("tasks", "data", "--env", name, *SIZES)
    ran("train", name, "--model", "m", "--device", "cpu", "--print", "--out", "run", *SIZES)
    for split in ("train", "val"):
        files = [open_parquet(Path(folder, f"{split}.parquet")).read() for folder in ("data", "run/tasks")]
        assert files[0] == files[1]


UNKNOWN = {
    "frozen_lak": "there is no environment 'frozen_lak'; did you mean 'frozenlake'?",
    "babyia": "did you mean 'babyai'",
    "turnkey/Taxy-v0": "did you mean 'turnkey/Taxi-v0'",
    "absent.py": "there is no file",
    "none.py": "none.py registers no environment: call gymnasium.register",
    "two.py": "two.py registers 2 environments: name one, as two.py:names/A-v0 or two.py:names/B-v0",
    "two.py:names/AA-v0": "two.py registers no 'names/AA-v0'; did you mean 'names/A-v0'? It has names/A-v0, names/B-v0",
    "none.py:names/A-v0": "none.py registers no environment",
}


@pytest.mark.parametrize("command", [by_train, by_tasks, by_env_check, by_panel, by_eval])
@pytest.mark.parametrize("name", UNKNOWN)
def test_each_command_refuses_what_is_no_environment_with_the_same_words(folder, name, command):
    files = sorted(folder.iterdir())
    with pytest.raises((ValueError, LookupError, ImportError), match=re.escape(UNKNOWN[name])):
        command(name)
    assert sorted(path for path in folder.iterdir() if path.name != "__pycache__") == files


def test_an_id_of_a_module_is_near(monkeypatch):
    with pytest.raises(UnknownEnvironmentError, match="did you mean 'names/Guess-v0'"):
        CliRunner().invoke(
            app, ["tasks", "data", "--env", "names/Gess-v0", "--module", "mine.py"], catch_exceptions=False
        )


@pytest.mark.parametrize(
    ("name", "further", "modules"),
    [
        ("mine.py", [], ["{here}/mine.py"]),
        ("mine.py", ["turnkey.modules=[json]"], ["{here}/mine.py", "json"]),
        ("names/Guess-v0", ["turnkey.modules=[mine.py]"], ["mine.py"]),
    ],
)
def test_modules_of_the_line_and_the_file_are_both_there(folder, name, further, modules):
    line = launch.overrides(
        launch.resolve(name, further),
        model="m",
        method="gigpo",
        device="cpu",
        gpus=1,
        steps=1,
        tasks=folder,
        out=folder,
        further=further,
    )
    modules_of_line = values([word for words in line for word in words], "turnkey.modules")
    assert modules_of_line == [[module.format(here=folder) for module in modules]]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("frozen_lake", r"short name of turnkey/FrozenLake-v0: \+turnkey/env=frozenlake on a launch line"),
        ("mine.py", "turnkey.modules"),
    ],
)
def test_a_launch_line_says_how_it_takes_the_name(name, words):
    from verl_turnkey.envs.registry import check_call

    with pytest.raises(UnknownEnvironmentError, match=words):
        check_call(name, {})
