"""What ``turnkey new`` and, in a clone, ``tools/new_part.py`` write works before anybody edits it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import gymnasium
import pytest
import yaml
from typer.testing import CliRunner

from verl_turnkey.envs.checking.report import check
from verl_turnkey.envs.user_modules import import_modules
from verl_turnkey.plugins.cli.main import app

ROOT = Path(__file__).parents[4]
KINDS = ("estimator", "loss", "env")
"""of the tool; of the command there are two more"""
ROOMS = ("advantage", "losses", "envs", "plugins", "recipe")
pytestmark = pytest.mark.timeout(1800)  # Pythons of their own, one of which runs further tests
NEW_PART = "tools/new_part.py"
REFUSED = ROOT / "tests/data/refused_new.yaml"


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the repository, with the package that Python finds there."""
    root = tmp_path_factory.mktemp("clone")
    for name in (*ROOMS, "docs", "tests", "tools"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, root)
    (root / ".package" / "verl_turnkey").mkdir(parents=True)
    shutil.copy(ROOT / "src" / "verl_turnkey" / "__init__.py", root / ".package" / "verl_turnkey")
    for room in ROOMS:
        (root / ".package" / "verl_turnkey" / room).symlink_to(root / room)
    return root


def python(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python in a clone, with the clone's code."""
    environment = {**os.environ, "PYTHONPATH": str(root / ".package")}
    return subprocess.run([sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True)


def ran(*arguments: str) -> str:
    """What ``turnkey`` prints in this process."""
    done = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def outputs(clone: Path) -> list[str]:
    """What ``tools/new_part.py`` prints, once for each kind."""
    texts = []
    for kind in KINDS:
        done = python(clone, NEW_PART, kind, f"fresh_{kind}", "--summary", f"a fresh {kind}")
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    return texts


@pytest.fixture(scope="module")
def grown(clone: Path, outputs: list[str]) -> Path:
    """The clone with a new one of each kind."""
    return clone


def test_files_that_are_named_are_there(grown: Path, outputs: list[str]):
    for text in outputs:
        written, rest = text.split("It works as it is. To make it yours, edit:\n")
        edited = [line.split()[0].strip(":,") for line in rest.split("Then:")[0].splitlines()]
        assert len(edited) >= 3
        for name in [*written.split()[3:], *edited]:
            assert (grown / name).is_file(), name


def test_what_is_new_in_a_clone_is_whole_and_green(grown: Path, outputs: list[str]):
    """The tests that the command names, those of all kinds at once."""
    lines = [shlex.split(line) for text in outputs for line in text.splitlines() if line.startswith("    pytest")]
    assert [line[-2:] for line in lines] == [["-k", f"fresh_{kind} or whole or table"] for kind in KINDS]
    tests = dict.fromkeys(name for line in lines for name in line[1:-2])
    done = python(grown, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, "-k", "fresh or whole or table")
    assert done.returncode == 0, done.stdout[-3000:]
    for name in ("methods", "losses", "environments"):
        assert "a fresh" in (grown / "docs" / f"{name}.md").read_text(), name


def test_what_is_new_in_a_clone_reads_as_the_rest(grown: Path):
    for command in (["check"], ["format", "--check"]):
        done = python(grown, "-m", "ruff", *command, "--no-cache", *ROOMS, "tests")
        assert done.returncode == 0, done.stdout


def test_in_a_clone_nothing_is_overwritten(grown: Path):
    again = python(grown, NEW_PART, "estimator", "fresh_estimator")
    assert again.returncode == 2
    assert "'fresh_estimator' is the estimator of verl_turnkey.advantage.methods.fresh_estimator" in again.stderr
    (grown / "docs" / "methods" / "other.md").write_text("mine")
    before = {path: path.read_bytes() for path in grown.rglob("*.py")}
    there = python(grown, NEW_PART, "estimator", "other")
    assert there.returncode == 2
    assert "nothing was written" in there.stderr
    assert "docs/methods/other.md" in there.stderr
    assert "recipe/config/turnkey/base.yaml" in python(grown, NEW_PART, "estimator", "base").stderr
    assert {path: path.read_bytes() for path in grown.rglob("*.py")} == before


def test_tables_of_a_clone_are_made_by_its_own_code(tmp_path):
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools" / "write_tables.py", tmp_path / "tools")
    done = subprocess.run([sys.executable, tmp_path / "tools" / "write_tables.py"], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"this clone is {tmp_path}" in done.stderr
    assert "pip install --no-deps -e" in done.stderr


@pytest.mark.parametrize(
    ("kind", "printed"),
    [
        ("estimator", "array([ 0. ,  0.5, -0.5])"),
        ("loss", "tensor("),
        ("modifier", "[ 0.5 -0.5]\n[ 0.5  -0.25]\n"),
        ("reward", "[0.1, 0.0]\n"),
    ],
)
def test_a_file_of_ones_own_runs_by_itself(tmp_path, monkeypatch, kind, printed):
    monkeypatch.chdir(tmp_path)
    lines = ran("new", kind, "my_own", "--summary", "mine")
    assert "    python my_own.py\n" in lines
    assert ("my_own.py:my_own" if kind == "reward" else "'turnkey.modules=[my_own.py]'") in lines
    done = subprocess.run([sys.executable, "my_own.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert printed in done.stdout
    assert ('"""mine"""' if kind == "reward" else 'summary="mine"') in (tmp_path / "my_own.py").read_text()


def test_an_environment_of_ones_own_is_one_to_train_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = ran("new", "env", "count_up", "--out", "games/mine.py")
    check_line, train_line = (line.strip() for line in lines.splitlines() if line.startswith("    turnkey"))
    assert check_line == "turnkey env-check games/mine.py"
    assert train_line.startswith("turnkey train games/mine.py --model")
    assert train_line.endswith("turnkey.rollout.max_turns=6")  # else 50 turns of a model that writes no action
    hints = [line for line in Path("games/mine.py").read_text().splitlines() if line.lstrip().startswith("#")]
    assert all(any(word in hint for hint in hints) for word in ("turnkey.rollout.max_turns", "admissible="))
    try:
        import_modules(["games/mine.py"])
        report = check("my/CountUp-v0", processes=0, seeds=2, rollouts=4, steps=12)
        assert [finding for finding in report.findings if finding.status in ("fail", "warn")] == []
    finally:
        gymnasium.registry.pop("my/CountUp-v0", None)


@pytest.mark.parametrize(("kind", "name"), [("env", "guess"), ("loss", "ratio"), ("modifier", "credit")])
def test_a_name_of_a_variable_inside_a_function_is_free(tmp_path, monkeypatch, kind, name):
    monkeypatch.chdir(tmp_path)
    ran("new", kind, name)
    done = subprocess.run([sys.executable, f"{name}.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("arguments", "words"), yaml.safe_load(REFUSED.read_text(encoding="utf-8")))
def test_what_cannot_be_written_is_refused(tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.py").write_text("mine")
    with pytest.raises((ValueError, FileExistsError)) as caught:
        CliRunner().invoke(app, ["new", *arguments], catch_exceptions=False)
    assert words in str(caught.value)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_kinds_are_named():
    done = CliRunner().invoke(app, ["new", "method", "mine"])
    assert done.exit_code == 2
    assert "expected one of estimator, loss, modifier, reward, env, got 'method'" in done.output
