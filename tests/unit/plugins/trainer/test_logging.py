"""A run's log says what was run and from where it resumed, without its secrets; a disk that refuses stops nothing."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path

from omegaconf import OmegaConf

from verl_turnkey.plugins.log.segments import read_segments
from verl_turnkey.plugins.trainer.logging import about, write_start

SEGMENT = "20260102T030405_00ff"


def configured(folder: Path | None, **turnkey):
    return OmegaConf.create(
        {
            "algorithm": {"adv_estimator": "gigpo"},
            "actor_rollout_ref": {
                "actor": {"policy_loss": {"loss_mode": "vanilla"}},
                "rollout": {"n": 8, "val_kwargs": {"n": 1}},
            },
            "data": {"train_batch_size": 16},
            "trainer": {"project_name": "babyai", "experiment_name": "gigpo", "epochs": "${algorithm.adv_estimator}"},
            "turnkey": {
                "credit": {"gamma": 0.9, "modify": [{"name": "empg"}]},
                "log": {
                    "trajectories": None if folder is None else str(folder),
                    "segment": SEGMENT,
                    "episodes_per_step": 64,
                    "validation_tasks": 640,
                },
                "env": {"kwargs": {"api_key": "sk-1", "url": "https://me:pw@host/x"}},
                **turnkey,
            },
        }
    )


def test_what_a_start_says_of_itself(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.json").write_text("[1]")
    name = "-c user.name=a -c user.email=a@b"
    for command in ("init -q .", "add train.json", f"{name} commit -q -m first"):
        subprocess.run(["git", *command.split()], check=True)
    config = configured(tmp_path / "log")
    config.data.train_files = "train.json"
    write_start(config, 12)
    [(name, start)] = read_segments(tmp_path / "log").items()
    assert (name, start["resumed_from"]) == (SEGMENT, 12)
    assert start["started"].endswith("+00:00")
    assert start["versions"].keys() == {"python", "verl", "verl-turnkey", "vllm", "torch", "ray", "transformers"}
    assert len(start["commit"]) == 40
    assert start["changed"] is False
    assert start["files"] == {"train.json": hashlib.sha256(b"[1]").hexdigest()}
    assert start["hardware"]["cores"] == len(os.sched_getaffinity(0))
    assert start["hardware"].keys() == {"cores", "memory_gb", "accelerators", "nodes", "per_node"}
    run = json.loads((tmp_path / "log" / "run.json").read_text())
    assert run["schema"] == 2
    assert (run["project"], run["experiment"], run["method"], run["loss"]) == ("babyai", "gigpo", "gigpo", "vanilla")
    assert run["params"]["gamma"] == 0.9
    assert [modifier["name"] for modifier in run["modify"]] == ["empg"]
    assert run["config"] == start["config"]
    for info in (run, start):
        assert (info["share"], info["validation_share"]) == (0.5, 0.1)
    assert run["config"]["trainer"]["epochs"] == "gigpo"
    assert run["config"]["turnkey"]["env"]["kwargs"] == {"api_key": "***", "url": "https://***@host/x"}
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "log", tmp_path / "log" / "segments")} == {0o700}


def test_uncommitted_changes_are_on_record(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("")
    for command in ("init -q .", "add own.py"):
        subprocess.run(["git", *command.split()], check=True)
    write_start(configured(tmp_path / "log"), 0)
    assert read_segments(tmp_path / "log")[SEGMENT]["changed"] is True


def test_outside_of_a_repository_and_without_a_log(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    write_start(configured(None), 0)
    assert list(tmp_path.iterdir()) == []
    write_start(configured(tmp_path / "log"), 0)
    assert read_segments(tmp_path / "log")[SEGMENT]["commit"] is None


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path, caplog):
    (tmp_path / "log").write_text("a file where a folder should be")
    write_start(configured(tmp_path / "log"), 0)
    [record] = caplog.records
    assert "turnkey.log.trajectories lacks the description of the run: " in record.getMessage()


def test_about_an_estimator_and_a_loss_of_others():
    config = configured(None, credit={})
    config.algorithm.adv_estimator = "grpo"
    config.actor_rollout_ref.actor.policy_loss.loss_mode = "gpg"
    info = about(config)
    assert (info["method"], info["params"], info["modify"], info["loss"]) == ("grpo", {}, [], "gpg")
