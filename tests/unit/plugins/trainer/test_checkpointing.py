"""The file of a method's state: what comes back, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from verl_turnkey.advantage import ConfigError
from verl_turnkey.plugins.trainer import checkpointing

STATE = {"white": 0.1 + 0.2, "black": -1e-17, "": 3.0}


def test_a_state_comes_back_to_the_last_bit(tmp_path: Path):
    folder = tmp_path / "global_step_3"
    checkpointing.save_state(folder, "rae", {"white": 1.0})
    checkpointing.save_state(folder, "rae", STATE)
    assert checkpointing.load_state(folder, "rae") == STATE
    assert [file.name for file in folder.iterdir()] == ["turnkey_credit.json"]


def test_a_write_that_breaks_off_leaves_the_file_before(tmp_path: Path):
    checkpointing.save_state(tmp_path, "rae", STATE)
    with pytest.raises(ValueError, match="not JSON compliant"):
        checkpointing.save_state(tmp_path, "rae", {"white": float("nan")})
    assert checkpointing.load_state(tmp_path, "rae") == STATE


def test_a_state_of_another_method_or_none_says_why(tmp_path: Path):
    assert checkpointing.load_state(tmp_path, "rae") == f"there is no {tmp_path}/turnkey_credit.json"
    checkpointing.save_state(tmp_path, "rae", STATE)
    assert checkpointing.load_state(tmp_path, "other") == f"{tmp_path}/turnkey_credit.json is of the method 'rae'"


@pytest.mark.parametrize(
    "held",
    [
        "{",
        "[]",
        json.dumps({"method": "rae"}),
        json.dumps({"method": "rae", "state": [1.0]}),
        json.dumps({"method": "rae", "state": {"white": "much"}}),
        json.dumps({"method": "rae", "state": {"white": float("nan")}}),
    ],
)
def test_a_file_that_holds_something_else_is_refused_by_name(tmp_path: Path, held: str):
    (tmp_path / checkpointing.FILE).write_text(held)
    with pytest.raises(ConfigError, match=r"turnkey_credit.json: expected .*the method starts over"):
        checkpointing.load_state(tmp_path, "rae")


def test_the_folder_is_the_one_that_verl_resumed_from():
    trainer = SimpleNamespace(default_local_dir="runs/a", resume_mode="auto", resume_from_path="runs/b/global_step_7")
    config = SimpleNamespace(trainer=trainer)
    assert checkpointing.resumed_folder(config, 7) == Path("runs/a/global_step_7")
    trainer.resume_mode = "resume_path"
    assert checkpointing.resumed_folder(config, 7) == Path("runs/b/global_step_7")
    assert checkpointing.folder_of(config, 7) == Path("runs/a/global_step_7")
