"""Whose log a folder holds: another run's is refused, a second attempt of the same run is warned."""

from __future__ import annotations

import json
import threading
import warnings
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.checks import resources
from verl_turnkey.plugins.checks.resources import check_log_folder
from verl_turnkey.plugins.checks.run import Run
from verl_turnkey.plugins.config.checkpoint_files import TRACKER
from verl_turnkey.plugins.config.schema import turnkey_config
from verl_turnkey.plugins.log.segments import write_segment

NAMES = [f"2026010{day}T030405_00ff" for day in (2, 3)]


def run(tmp_path: Path, **trainer: str) -> DictConfig:
    own = {"project_name": "babyai", "experiment_name": "gigpo", "default_local_dir": str(tmp_path / "checkpoints")}
    log = {"trajectories": str(tmp_path / "log")}
    return OmegaConf.create({"trainer": {"resume_mode": "auto", **own, **trainer}, "turnkey": {"log": log}})


def log(tmp_path: Path, name: str = NAMES[0], **trainer: str) -> None:
    config = OmegaConf.to_container(run(tmp_path, **trainer))
    write_segment(tmp_path / "log", name, {"resumed_from": 0, "config": config})


def check(config: DictConfig) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_log_folder(Run(config, turnkey_config(config)))
    return [str(warning.message) for warning in caught]


def save(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / TRACKER).write_text("3")


def test_a_new_folder_and_no_log(tmp_path: Path):
    config = run(tmp_path)
    assert check(config) == []
    (tmp_path / "log").mkdir()
    assert check(config) == []
    log(tmp_path, experiment_name="salt")
    config.turnkey.log.trajectories = None
    assert check(config) == []


@pytest.mark.parametrize("key", ["project_name", "experiment_name"])
@pytest.mark.parametrize("resumes", [True, False])
def test_the_log_of_another_run_is_refused(tmp_path: Path, key, resumes):
    log(tmp_path, **{key: "other"})
    if resumes:
        save(tmp_path)
    with pytest.raises(ConfigError, match=rf"trajectories=.*log holds .*trainer\.{key}=other, here .*another folder"):
        check(run(tmp_path))


@pytest.mark.parametrize("mode", ["auto", "disable"])
def test_a_run_that_begins_anew_is_warned_of_its_own_log(tmp_path: Path, mode):
    """As one that stopped before its first checkpoint; the latest start says whose log it is."""
    log(tmp_path, experiment_name="salt")
    log(tmp_path, NAMES[1])
    [warning] = check(run(tmp_path, resume_mode=mode))
    assert f"trajectories={tmp_path}/log" in warning
    assert f"starts over (trainer.resume_mode={mode})" in warning


def test_a_log_that_was_moved_or_copied_with_its_checkpoints_is_that_of_the_run(tmp_path: Path):
    there = tmp_path / "there"
    config = OmegaConf.to_container(run(there))
    write_segment(tmp_path / "log", NAMES[0], {"resumed_from": 0, "config": config})
    [warning] = check(run(tmp_path))
    assert "the log of an earlier start of this run" in warning


def test_equal_names_with_checkpoints_elsewhere_are_another_run_unless_it_resumes(tmp_path: Path):
    """Names are often verl's defaults; a run that was moved has the same log with it."""
    log(tmp_path, default_local_dir="/elsewhere")
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir=/elsewhere, here "):
        check(run(tmp_path))
    assert check(run(tmp_path, resume_mode="resume_path")) == []
    save(tmp_path)
    assert check(run(tmp_path)) == []
    with pytest.raises(ConfigError, match="holds the log of another run"):
        check(run(tmp_path, resume_mode="disable"))


@pytest.mark.parametrize("facts", [{}, {"config": None}, {"config": {"trainer": []}}], ids=str)
def test_of_a_start_that_says_nothing_of_itself_a_warning_is_given(tmp_path: Path, facts):
    write_segment(tmp_path / "log", NAMES[0], facts)
    assert len(check(run(tmp_path))) == 1


def test_a_login_in_an_address_is_masked_in_the_log_and_compared_so(tmp_path: Path):
    address = "hdfs://me@host/checkpoints"
    log(tmp_path, default_local_dir="hdfs://***@host/checkpoints")
    assert len(check(run(tmp_path, default_local_dir=address))) == 1


@pytest.mark.parametrize(
    ("path", "status", "problem"),
    [
        ("runs/warmm", 404, "no such folder and no such model on the hub; did you mean 'runs/warm'?"),
        ("runs/other", 404, "no such folder and no such model on the hub"),
        ("gpt2", 404, None),
        ("wart", 404, "no such folder and no such model on the hub; did you mean 'wart1'?"),
        ("runs/warmm", 200, None),
        ("runs/warmm", 403, None),  # gated: it is there
        ("runs/warmm", None, "the hub cannot be asked for a model of that name"),
        ("Qwen/Qwen3-0.6B", None, None),  # no folder here is called Qwen: no question
    ],
)
def test_a_name_of_the_hub_that_is_a_mistyped_folder(tmp_path, monkeypatch, path, status, problem):
    class Hub(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.send_header("X-Error-Code", {404: "RepoNotFound", 403: "GatedRepo"}.get(status, ""))
            self.end_headers()
            self.wfile.write(json.dumps({"id": path, "siblings": []}).encode())

        def log_message(self, *_):
            pass

    monkeypatch.chdir(tmp_path)
    for folder in ("runs/warm", "wart1"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").write_text("{}")
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port if status else 9
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        came = resources._typed(path)
        server.shutdown()
    assert (came is None) == (problem is None)
    assert (problem or "") in (came or "")
