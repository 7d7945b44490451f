"""A method's state in verl's checkpoints: a run that resumes goes on as if it had never stopped."""

from __future__ import annotations

import hashlib
import json
import re
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from contract_tools import PARTITION, SEPARATE, Compose, Episode, Saves, advance, fill, read
from verl.trainer.ppo.v1 import get_trainer_cls

from verl_turnkey.advantage import ConfigError, Credit, modifying, register_modifier
from verl_turnkey.plugins.cli.panel import find
from verl_turnkey.plugins.config.checkpoint_files import DATA, PANEL
from verl_turnkey.plugins.config.playing import words
from verl_turnkey.plugins.trainer.checkpointing import CheckpointError
from verl_turnkey.plugins.trainer.worker_setup import set_up_training

MODES = ("sync", "colocate_async", "separate_async")
FILE = "turnkey_credit.json"


def played(reward: float, role: str) -> Episode:
    return [{"reward": reward, "extra": {"role": role}}]


#: Batches of one update each.
BATCHES: list[dict[str, list[Episode]]] = [
    {"a": [played(1.0, "first"), played(0.0, "second")], "b": [played(0.5, "first"), "it died"]},
    {"a": [played(0.25, "second"), played(1.0, "second")]},
    {"a": [played(1.0, "first"), played(0.5, "second")], "b": [played(0.0, "third"), played(0.0, "first")]},
]

Build = Callable[..., Any]


@pytest.fixture
def build(queue, compose: Compose, tmp_path: Path) -> Build:
    """A trainer that has not started its workers and saves below ``tmp_path``."""

    def made(mode: str, *overrides: str, recipe: str = "rae") -> Any:
        overrides = (*(SEPARATE if mode == "separate_async" else ()), *overrides)
        where = (f"trainer.default_local_dir={tmp_path}", "trainer.save_freq=1")
        config = compose(f"+turnkey={recipe}", f"trainer.v1.trainer_mode=turnkey_{mode}", *where, *overrides)
        trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        trainer.checkpoint_manager = trainer.actor_rollout_wg = trainer.train_dataloader = Saves()
        trainer.global_steps = 1
        return trainer

    return made


def train(trainer: Any, episodes: dict[str, list[Episode]]) -> dict[str, float]:
    """One update up to its advantages, by row key."""
    batch = fill(episodes)
    try:
        return {key: tokens[0] for key, tokens in read(advance(trainer, batch), "advantages").items()}
    finally:
        tq.kv_clear(keys=batch.keys, partition_id=PARTITION)


def test_batches_continue_from_the_ones_before(build: Build):
    """Also inside one step: separate_async has several updates in each."""
    trainer = build("separate_async")
    train(trainer, BATCHES[0])
    first = dict(trainer.advantage_step.state)
    assert set(first) == {"first", "second"}
    train(trainer, BATCHES[1])
    assert trainer.advantage_step.state["first"] == first["first"] != 0
    assert trainer.advantage_step.state["second"] == pytest.approx(0.95**2 * first["second"] + (1 - 0.95**2) * 0.625)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("resume", ["auto", "resume_path"])
def test_a_resumed_run_goes_on_like_an_unbroken_one(build: Build, tmp_path: Path, mode: str, resume: str):
    unbroken = build(mode)
    expected = [train(unbroken, episodes) for episodes in BATCHES]
    broken = build(mode)
    assert [train(broken, episodes) for episodes in BATCHES[:2]] == expected[:2]
    broken.global_steps = 2
    broken._save_checkpoint()
    how = [f"trainer.resume_mode={resume}"]
    if resume == "resume_path":
        (tmp_path / "global_step_2").rename(tmp_path / "moved_global_step_2")
        how.append(f"trainer.resume_from_path={tmp_path}/moved_global_step_2")
    resumed = build(mode, *how)
    resumed._load_checkpoint()
    assert resumed.global_steps == 2
    assert resumed.advantage_step.state == broken.advantage_step.state
    assert train(resumed, BATCHES[2]) == expected[2] != train(build(mode), BATCHES[2])
    assert resumed.advantage_step.state == unbroken.advantage_step.state


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_stops_saves_what_it_remembers(build: Build, tmp_path: Path, mode: str):
    """Updates of the step that stopped are in the weights, and in the state."""
    trainer = build(mode)
    train(trainer, BATCHES[0])
    trainer.global_steps = 2
    train(trainer, BATCHES[1])
    trainer.on_sample_end = lambda: None  # puts the servers to sleep
    trainer.checkpointing.save_stopping(1)
    held = json.loads((tmp_path / "global_step_1" / FILE).read_text())
    assert held == {"method": "rae", "state": trainer.advantage_step.state}


def test_the_state_is_there_before_verl_calls_the_checkpoint_complete(build: Build, tmp_path: Path):
    trainer = build("sync")
    train(trainer, BATCHES[0])

    def fails() -> None:
        assert (tmp_path / "global_step_1" / FILE).is_file()
        raise OSError("the disk is full")

    trainer.train_dataloader.state_dict = fails
    with pytest.raises(CheckpointError, match="disk is full"):
        trainer._save_checkpoint()
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()
    assert trainer.checkpointing.saved is None


@pytest.mark.parametrize("other", ["none", "another"])
def test_a_checkpoint_without_the_state_is_warned_of_once(build: Build, tmp_path: Path, caplog, other: str):
    trainer = build("sync")
    train(trainer, BATCHES[0])
    trainer._save_checkpoint()
    file = tmp_path / "global_step_1" / FILE
    if other == "none":
        file.unlink()
    else:
        file.write_text(file.read_text().replace('"rae"', '"raae"'))
    caplog.clear()
    resumed = build("sync")
    resumed._load_checkpoint()
    assert (resumed.global_steps, resumed.advantage_step.state) == (1, {})
    why = "there is no" if other == "none" else "is of the method 'raae'"
    messages = [record.getMessage() for record in caplog.records if record.name == "verl_turnkey"]
    assert len(messages) == 1
    assert why in messages[0]
    assert messages[0].endswith(": rae starts without the state of the steps before")


GIVEN = "turnkey.credit.prior=given"


@pytest.mark.parametrize(("recipe", "overrides"), [("gigpo", []), ("base", []), ("shrinkage", [GIVEN])])
@pytest.mark.parametrize("held", ['{"method": "shrinkage", "state": {"first": 1.0}}', "half a fi"])
def test_methods_that_remember_nothing_write_and_read_nothing(
    build: Build, tmp_path: Path, caplog, recipe: str, overrides: list[str], held: str
):
    trainer = build("sync", *overrides, recipe=recipe)
    trainer._save_checkpoint()
    folder = tmp_path / "global_step_1"
    assert not (folder / FILE).exists()
    (folder / FILE).write_text(held)
    resumed = build("sync", *overrides, recipe=recipe)
    resumed._load_checkpoint()
    assert (resumed.global_steps, resumed.advantage_step.state) == (1, {})
    assert [record for record in caplog.records if record.name == "verl_turnkey"] == []


def test_a_checkpoint_names_the_panel_and_the_tasks_that_the_run_started_with(build: Build, tmp_path: Path):
    panel = find("frozenlake-48")
    file = tmp_path / "lake.parquet"
    panel.write_parquet(file, panel.tasks({}))
    files = [f"data.train_files={file}", f"data.val_files={file}"]
    trainer = build("sync", "+turnkey/env=frozenlake", *words(panel), *files)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    file.unlink()
    trainer._save_checkpoint()
    assert json.loads((tmp_path / "global_step_1" / DATA).read_text()) == {"tasks": 48, "files": [digest]}
    assert json.loads((tmp_path / "global_step_1" / PANEL).read_text()) == panel.mark


def test_a_run_from_scratch_says_nothing(build: Build, caplog):
    trainer = build("sync")
    trainer._load_checkpoint()
    assert (trainer.global_steps, trainer.advantage_step.state) == (0, {})
    assert [record for record in caplog.records if record.name == "verl_turnkey"] == []


@pytest.fixture
def counter() -> Iterator[None]:
    """The modifier ``contract_counter``, whose advantages are the number of the batch."""

    @dataclass(frozen=True)
    class NoParams:
        pass

    @register_modifier("contract_counter", params=NoParams, stateful=True)
    def contract_counter(batch, params, estimate, state):
        number = state.get("batches", 0.0) + 1
        estimate(batch)
        return Credit(np.full(len(batch), number), state={"batches": number})

    yield
    del modifying._MODIFIERS["contract_counter"]


@pytest.mark.parametrize("recipe", ["grpo_steps", "rae"])
def test_modifiers_go_on_too(build: Build, tmp_path: Path, counter, recipe: str):
    """Beside an estimator that remembers something, and one that does not."""
    modify = "turnkey.credit.modify=[{name: contract_counter}]"
    trainer = build("sync", modify, recipe=recipe)
    assert set(train(trainer, BATCHES[0]).values()) == {0.0, 1.0}  # 0: the failed row
    assert train(trainer, BATCHES[1])["a_0_0"] == 2
    trainer._save_checkpoint()
    resumed = build("sync", modify, recipe=recipe)
    resumed._load_checkpoint()
    assert ("second" in resumed.advantage_step.state) is (recipe == "rae")
    assert train(resumed, BATCHES[1])["a_0_0"] == 3


@pytest.mark.parametrize("mode", MODES)
def test_the_trainer_falls_back_too(build: Build, tmp_path: Path, caplog, mode: str):
    """Where the driver does not see the folder."""
    trainer = build(mode)
    for step, episodes in enumerate(BATCHES[:2], 1):
        train(trainer, episodes)
        trainer.global_steps = step
        trainer._save_checkpoint()
        if step == 1:
            held = dict(trainer.advantage_step.state)
    broken = tmp_path / "global_step_2" / "actor" / "model_world_size_8_rank_5.pt"
    broken.write_bytes(broken.read_bytes()[:100])
    caplog.clear()
    resumed = build(mode)
    resumed._load_checkpoint()
    assert (resumed.global_steps, resumed.advantage_step.state) == (1, held)
    (message,) = (record.getMessage() for record in caplog.records if record.name == "verl_turnkey")
    assert f"{broken} is truncated" in message
    broken = tmp_path / "global_step_1" / "data.pt"
    broken.write_bytes(b"")
    with pytest.raises(ConfigError, match=r"global_step_2/actor/.* is truncated .*no other checkpoint"):
        build(mode)._load_checkpoint()


@pytest.mark.parametrize("mode", MODES)
def test_a_full_disk_says_where_and_how_to_resume(build: Build, tmp_path: Path, mode: str):
    trainer = build(mode)
    trainer._save_checkpoint()
    trainer.global_steps = 2
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "global_step_2" / "data.pt").symlink_to("/dev/full")  # every write fails as on a full disk
    with pytest.raises(CheckpointError) as raised:
        trainer._save_checkpoint()
    message = str(raised.value)
    assert message.startswith(f"the checkpoint {tmp_path}/global_step_2 could not be written (")
    assert re.search(r"\d+\.\d\d GiB are free there", message)
    assert f"Of the checkpoints in {tmp_path} global_step_1 is the newest complete one" in message
    assert "the same command with trainer.resume_mode=auto" in message
    resumed = build(mode)
    resumed._load_checkpoint()
    assert resumed.global_steps == 1


def test_a_disk_that_is_full_at_the_last_byte_leaves_the_tracker(build: Build, tmp_path: Path, monkeypatch):
    """verl empties the file before it writes the number."""
    trainer = build("sync")
    trainer._save_checkpoint()
    trainer.global_steps = 2
    save, limits = torch.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def last(state: Any, path: str | Path) -> None:
        save(state, path)
        if str(path).endswith("data.pt"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))

    monkeypatch.setattr(torch, "save", last)
    try:
        with pytest.raises(CheckpointError, match=r"File too large.* global_step_1 is the newest complete one"):
            trainer._save_checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["latest_checkpointed_iteration.txt"]


def test_a_folder_that_cannot_be_written_is_named(build: Build, tmp_path: Path):
    trainer = build("sync")
    (tmp_path / "global_step_1").write_text("a file in its place")
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/global_step_1 could not be written .* there is none"):
        trainer._save_checkpoint()


@ray.remote(num_cpus=0)
class TrainingProcess:
    """One without an engine."""

    def __init__(self) -> None:
        from verl.trainer.ppo import core_algos  # noqa: F401 - as an engine does, so that estimators are registered


def test_a_folder_that_a_node_cannot_write_is_refused_at_the_start(build: Build, tmp_path: Path):
    """/sys stands for a file system that a node has mounted for reading."""
    trainer = build("sync")
    workers = [TrainingProcess.remote() for _ in range(2)]
    trainer.actor_rollout_wg = SimpleNamespace(workers=workers)

    def start(folder: str, save_freq: int = 1) -> None:
        trainer.config.trainer.update(default_local_dir=folder, save_freq=save_freq)
        set_up_training(trainer, trainer.turnkey, trainer.advantage_step)

    start(f"{tmp_path}")
    start(f"{tmp_path}/not/made/yet")
    assert list(tmp_path.iterdir()) == []
    refusal = rf"default_local_dir=/sys/checkpoints cannot be written on {socket.gethostname()} \([^:]+: /sys\)\. The"
    with pytest.raises(ConfigError, match=refusal):
        start("/sys/checkpoints")
    start("/sys/checkpoints", save_freq=-1)
    for worker in workers:
        ray.kill(worker)


def test_snapshots_of_the_queue_go_with_the_weights(build: Build, tmp_path: Path):
    """verl's limit removes the weights of old checkpoints, and leaves all rows of their batches."""
    trainer = build("colocate_async", recipe="gigpo")
    (tmp_path / "global_step_1" / "transfer_queue").mkdir(parents=True)  # of an earlier start, whatever it is
    folders = [tmp_path / f"global_step_{step}" for step in (2, 3, 4)]
    for trainer.global_steps, folder in enumerate(folders, 2):
        (folder / "actor").mkdir(parents=True)
        if folder == folders[-1]:
            shutil.rmtree(folders[0] / "actor")
        trainer._save_checkpoint()
        assert (folder / "transfer_queue").is_dir()
    assert [(folder / "transfer_queue").is_dir() for folder in folders] == [False, True, True]
    assert (folders[0] / "data.pt").is_file()
    assert (tmp_path / "global_step_1" / "transfer_queue").is_dir()


def test_of_weights_that_are_elsewhere_nothing_is_known(build: Build, tmp_path: Path):
    trainer = build("colocate_async", recipe="gigpo")
    trainer.actor_rollout_wg.save_checkpoint = lambda *_, **__: None
    for trainer.global_steps in (1, 2, 3):
        trainer._save_checkpoint()
    assert all((tmp_path / f"global_step_{step}" / "transfer_queue").is_dir() for step in (1, 2, 3))
