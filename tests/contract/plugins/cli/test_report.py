"""A report of a run, and the line that repeats it."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from synthetic_run import write as write_log
from typer.testing import CliRunner

from verl_turnkey.plugins.cli import launch
from verl_turnkey.plugins.cli.main import app
from verl_turnkey.plugins.config.composing import composed
from verl_turnkey.plugins.config.overrides import override
from verl_turnkey.plugins.log.writer import sha256
from verl_turnkey.plugins.view.runs import OUTPUTS, flat

SECRET = "sk-1234"
URL = override("+turnkey.env.kwargs.url", f"https://me:{SECRET}@host/x?api_key={SECRET}")
RECORD = """
import sys, hydra
from hydra.core.plugins import Plugins
from verl_turnkey.plugins.config.composing import verls_config_dir
from verl_turnkey.plugins.config.composing import TurnkeySearchPath
Plugins.instance().register(TurnkeySearchPath)
hydra.main(str(verls_config_dir()), "ppo_trainer", version_base=None)(lambda config: None)()
"""
"""verl's main program up to its first line: Hydra writes its record of the run"""


def turnkey(*words: str | Path, code: int = 0):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == code, done.output
    return done


def finished(folder: Path) -> Path:
    """A run with Hydra's own record, metrics and a log."""
    played = launch.resolve("errands", ("turnkey.rollout.max_turns=7",))
    sizes = {"model": "a/b", "method": "gigpo", "device": "cpu", "gpus": 1, "steps": 6}
    further = ("turnkey.rollout.max_turns=7", URL)
    lines = launch.overrides(played, **sizes, tasks=folder / "tasks", out=folder, further=further)
    (folder / "tasks").mkdir(parents=True)
    (folder / "tasks" / "train.parquet").write_text("train")
    subprocess.run([sys.executable, "-c", RECORD, *(word for line in lines for word in line)], check=True, cwd=folder)
    log = write_log(folder)
    (log / "segments").mkdir()
    facts = {
        "versions": {"python": "3.9.0", "verl": "0.0.1", "nosuch": "1"},
        "hardware": {"cores": 4096},
        "commit": "0" * 40,
        "files": {
            str(folder / "tasks" / "train.parquet"): sha256(folder / "tasks" / "train.parquet"),
        },
    }
    (folder / "env.py").write_text("edited")
    for name, step, env in (("20251231T000000_00ff", 0, "first"), ("20260102T030405_00ff", 10, "edited")):
        digest = hashlib.sha256(env.encode()).hexdigest()
        module = {"path": str(folder / "env.py"), "sha256": digest}
        servers = {"path": str(folder / "mcp.json"), "sha256": "0" * 64}  # not there any more
        files = {"turnkey.modules": {"env.py": module}, "turnkey.mcp.servers": {"mcp.json": servers}}
        start = {**facts, "resumed_from": step, "sources": files}
        (log / "segments" / f"{name}.json").write_text(json.dumps(start))
    data = [{"step": step, "data": {"episode/success_rate": step / 10, "timing_s/step": 2.0}} for step in range(1, 7)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in data))
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def run(home: Path) -> Path:
    return finished(home / "first")


@pytest.fixture(autouse=True)
def at_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))


def test_it_has_what_a_repeat_takes_and_no_secret(run: Path, home: Path) -> None:
    turnkey("report", "write", run)
    text = (run / "report.json").read_text()
    assert SECRET not in text
    assert str(home) not in text
    report = json.loads(text)
    assert report["method"] == "gigpo"
    assert report["versions"]["verl"] == "0.0.1"
    assert report["hardware"] == {"cores": 4096}
    assert report["code"]["commit"] == "0" * 40
    assert list(report["files"]) == ["~/first/tasks/train.parquet", "~/first/env.py", "~/first/mcp.json"]
    first, edited = (hashlib.sha256(text.encode()).hexdigest() for text in ("first", "edited"))
    module = {"path": "~/first/env.py", "sha256": edited}
    assert report["code"]["files"]["turnkey.modules"] == {"env.py": module}
    change = {"start": 2, "resumed_from": 10, "file": "env.py", "before": first[:12], "after": edited[:12]}
    assert report["code"]["changes"] == [change]
    assert "env.py had changed at start 2, which went on from step 10" in report["notes"]
    assert report["differences"]["turnkey.rollout.max_turns"] == [7, None]
    assert report["seeds"]["actor_rollout_ref.rollout.seed"] == 42
    assert "data.seed" not in report["seeds"]  # verl's null: torch's own constant orders the tasks
    assert report["curves"]["episode/success_rate"]["value"] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert report["seconds_per_step"] == {"step": 2.0}
    assert [result["what"] for result in report["results"]] == ["validation success", "training success"]
    for result in report["results"]:
        assert result["low"] <= result["value"] <= result["high"]
        assert result["low"] < result["high"]
        assert result["tasks"]
    assert [word for word in report["launch"] if word.startswith("data.train_files=")]


def test_the_report_of_a_copy_is_of_the_copy(run: Path, home: Path) -> None:
    shutil.copytree(run, home / "second")
    turnkey("report", "write", home / "second", "--out", home / "out")
    assert "~/first" not in (home / "out" / "report.json").read_text()
    differ = json.loads(turnkey("report", "repeat", home / "out" / "report.json", "--json").stdout)["differs"]
    assert not [line for line in differ if "train.parquet" in line]


def test_the_line_composes_to_the_configuration_of_the_run(run: Path) -> None:
    turnkey("report", "write", run)
    done = turnkey("report", "repeat", run / "report.json", "--out", run.parent / "again")
    python, dash, main, *words = shlex.split(done.stdout)
    assert (python, dash, main) == ("python", "-m", "verl.trainer.main_ppo")
    config = composed([word for word in words if not word.startswith("hydra.")])
    again = dict(flat(OmegaConf.to_container(config, resolve=False)))
    [record] = run.rglob(".hydra/config.yaml")
    first = dict(flat(OmegaConf.to_container(OmegaConf.load(record), resolve=False)))
    differ = {key for key in {*first, *again} if first.get(key) != again.get(key)}
    assert differ == {key for key in differ if OUTPUTS.search(key)} | {"turnkey.env.kwargs.url"}
    assert {"trainer.default_local_dir", "turnkey.log.trajectories"} <= differ
    assert not [value for key, value in again.items() if key in differ and str(run) in str(value)]


def test_what_differs_on_this_machine(run: Path) -> None:
    turnkey("report", "write", run)
    train = run / "tasks" / "train.parquet"
    lines = json.loads(turnkey("report", "repeat", run / "report.json", "--json").stdout)["differs"]
    starts = ("python ", "verl ", "nosuch is not installed", "cores: ", "the working folder was at commit")
    assert not [line for line in lines if "env.py" in line]
    for start in (*starts, f"data.val_files: {run}/tasks/val.parquet is missing", f"{run}/mcp.json is"):
        assert [line for line in lines if line.startswith(start)], (start, lines)
    assert [line for line in lines if line.endswith("fill in your own secret for ***")]
    assert not [line for line in lines if str(train) in line]
    train.write_text("other")
    try:
        lines = json.loads(turnkey("report", "repeat", run / "report.json", "--json").stdout)["differs"]
    finally:
        train.write_text("train")
    assert [line for line in lines if line.startswith(f"data.train_files: {train} differs")]


def test_a_folder_without_a_run_and_a_file_without_a_report_are_refused(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("[]")
    cases = {
        ("report", "write", tmp_path): "the folder of a run",
        ("report", "repeat", tmp_path / "report.json"): "a report.json",
    }
    for words, expected in cases.items():
        done = CliRunner().invoke(app, [str(word) for word in words])
        assert done.exit_code
        assert f"expected {expected}" in str(done.exception)
