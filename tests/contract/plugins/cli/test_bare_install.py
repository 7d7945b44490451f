"""A wheel, made from the sdist, without verl, torch and Ray: what works there, and what says what to install."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[4]
UV = Path(sys.executable).with_name("uv")
VERSIONS = ("3.10", "3.11", "3.12")


def interpreters() -> list[str]:
    """Ours, and those of the other supported versions that this machine has."""
    names = [name for version in VERSIONS if (name := shutil.which(f"python{version}"))]
    pyenv = Path("~/.pyenv/versions").expanduser()
    names += [str(path) for version in VERSIONS for path in pyenv.glob(f"{version}.*/bin/python")]
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    own = ".".join(map(str, sys.version_info[:2]))
    versions = {own: sys.executable}
    for name in names:
        done = subprocess.run([name, "-c", code], capture_output=True, text=True)
        if done.returncode == 0:
            versions.setdefault(done.stdout.strip(), name)
    return list(versions.values())


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is made from it."""
    out = tmp_path_factory.mktemp("published")
    source = out / "source"
    kept = ("advantage", "losses", "envs", "plugins", "recipe", "src")
    for name in kept:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run([UV, "build", "--quiet", "--out-dir", out, source], check=True)
    return out


@pytest.fixture(scope="module", params=interpreters())
def turnkey(request: pytest.FixtureRequest, published: Path, tmp_path_factory: pytest.TempPathFactory):
    """The command of a bare environment: the wheel, what it depends on, and what ``view`` needs."""
    venv = tmp_path_factory.mktemp("bare") / "venv"
    subprocess.run([UV, "venv", "--quiet", "--python", request.param, venv], check=True)
    [wheel] = published.glob("*.whl")
    install = [UV, "pip", "install", "--quiet", "--python", venv / "bin" / "python", f"{wheel}[view]"]
    subprocess.run(install, check=True)
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    names = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "TURNKEY_DEVICE")}

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [venv / "bin" / "turnkey", *arguments]
        return subprocess.run(command, text=True, capture_output=True, cwd=elsewhere, env=names, timeout=300)

    return run


@pytest.mark.parametrize("python", interpreters())
def test_the_sdist_installs_what_the_wheel_does(published: Path, tmp_path: Path, python: str) -> None:
    files = {}
    for kind in (".whl", ".tar.gz"):
        [package] = published.glob(f"*{kind}")
        target = tmp_path / kind
        install = [UV, "pip", "install", "--quiet", "--python", python, "--no-deps", "--target", target, package]
        subprocess.run(install, check=True)
        files[kind] = {
            str(path.relative_to(target)): path.read_bytes()
            for path in target.rglob("*")
            if path.is_file() and not {"__pycache__", "bin"} & {*path.parts} and ".dist-info" not in str(path)
        }
    assert "verl_turnkey/recipe/config/turnkey/gigpo.yaml" in files[".whl"]
    assert files[".tar.gz"] == files[".whl"]


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (["--version"], "verl-turnkey"),
        (["--help"], "env-check"),
        (["methods"], "+turnkey=gigpo"),
        (["losses"], "+turnkey/loss=turn_ratio"),
        (["modifiers"], "alpha"),
        (["envs", "--json"], "turnkey/Errands-v0"),
        (["keys"], "turnkey.rollout.max_turns"),
        (["check", "--help"], "without starting Ray"),
        (["env-check", "turnkey/Errands-v0", "--processes", "0"], "turnkey/Errands-v0"),
        (["new", "env", "my_env", "--out", "my_env.py"], "my_env.py"),
        (["tasks", "tasks", "--env", "turnkey/Errands-v0", "--train", "2", "--val", "2"], "2 tasks in"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_it_works_without_verl(turnkey, arguments: list[str], output: str) -> None:
    done = turnkey(*arguments)
    assert done.returncode == 0, done.stderr
    assert output in done.stdout


def test_doctor_says_what_is_missing(turnkey) -> None:
    done = turnkey("doctor")
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert "verl" in done.stdout


def test_what_reads_the_log_of_a_run(turnkey, tmp_path: Path) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "unit"))
    try:
        from synthetic_run import write
    finally:
        sys.path.pop(0)
    write(tmp_path / "run")
    metrics = [{"step": step, "data": {"episode/success_rate": step / 10}} for step in range(1, 4)]
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    page = tmp_path / "view.html"
    done = turnkey("view", tmp_path / "run", "--out", page)
    assert done.returncode == 0, done.stderr
    assert page.stat().st_size > 100_000
    done = turnkey("compare", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    record = tmp_path / "run" / "hydra" / ".hydra"
    record.mkdir(parents=True)
    config = {"turnkey": {"env": {"id": "example/Household-v0"}}, "trainer": {"default_local_dir": "x/checkpoints"}}
    (record / "config.yaml").write_text(json.dumps(config))
    sources = [{"provider": "main", "path": "/another/venv/verl/trainer/config"}]
    hydra = {
        "overrides": {"task": ["+turnkey=gigpo"], "hydra": []},
        "job": {"config_name": "ppo_trainer"},
        "runtime": {"cwd": str(tmp_path), "config_sources": sources},
    }
    (record / "hydra.yaml").write_text(json.dumps({"hydra": hydra}))
    done = turnkey("report", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    done = turnkey("repeat", tmp_path / "run" / "report.json")
    assert done.stdout.startswith("python -m verl.trainer.main_ppo +turnkey=gigpo trainer.default_local_dir=")
    done = turnkey("repeat", tmp_path / "run" / "report.json", tmp_path / "run")
    assert done.returncode == 0, done.stdout + done.stderr
    done = turnkey("prm-data", tmp_path / "run", "--out", tmp_path / "prm.parquet")
    assert done.returncode == 0, done.stderr
    held_out = tmp_path / "prm_held_out.parquet"
    assert f"in {held_out}" in done.stdout
    scores = tmp_path / "scores.parquet"
    pd.read_parquet(held_out).rename(columns={"label": "score"})[["episode", "turn", "score"]].to_parquet(scores)
    done = turnkey("prm-eval", held_out, "--scores", scores)
    assert done.returncode == 0, done.stderr
    assert "accuracy           1.000" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["train", "errands", "--model", "m"], ["check", "+turnkey=gigpo"], ["eval", "errands", "--checkpoint", "m"]],
    ids=lambda value: value[0],
)
def test_what_needs_verl_says_what_to_install(turnkey, arguments: list[str]) -> None:
    done = turnkey(*arguments)
    assert done.returncode == 2
    assert "verl" in done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr
