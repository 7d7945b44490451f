"""What ends a real run costs the steps since the checkpoint: a signal, and processes that die.

With ``-s`` the seconds from the fault to the end of the run are printed, and what is left of it.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from launch import minigrid, started
from measured import Fault, own_tmp, suffered
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import create_rl_sampler

from verl_turnkey.plugins.shutdown import run_files
from verl_turnkey.plugins.view.join import read

HERE = Path(__file__).parent
QUICKSTART = HERE.parents[1] / "examples" / "quickstart"
LEVEL = {"level": "MiniGrid-DoorKey-5x5-v0", "max_steps": 5}


def play(out: Path, model: Path, *overrides: str) -> tuple[str, ...]:
    return (
        "+turnkey=gigpo",
        *minigrid(out, LEVEL, train=16, seed=0),
        "+turnkey/device=cpu",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.save_freq=1000",
        "trainer.total_training_steps=1000",
        f"trainer.default_local_dir={out.parent}/checkpoints",
        f"turnkey.log.trajectories={out.parent}/log",
        # A worker of the engine has a process of its own, as on several GPUs: they share memory.
        "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=mp",
        *overrides,
    )


def steps(out: Path) -> list[int]:
    return [entry["step"] for entry in entries(out)]


def entries(out: Path) -> list[dict[str, Any]]:
    """The lines of ``metrics.jsonl``, without one that is being written."""
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def until_step(out: Path, process: subprocess.Popen) -> int:
    """The newest step whose metrics are there."""
    for _ in range(15000):
        if reached := steps(out):
            return reached[-1]
        assert process.poll() is None, (out / "log.txt").read_text()[-6000:]
        time.sleep(0.1)
    pytest.fail((out / "log.txt").read_text()[-6000:])


def commands(pid: int, recursive: bool = True) -> dict[psutil.Process, str]:
    """The command lines of the processes below ``pid``."""
    lines = {}
    for child in psutil.Process(pid).children(recursive=recursive):
        with suppress(psutil.Error):  # some are short-lived
            lines[child] = " ".join(child.cmdline())
    return lines


def kill(process: subprocess.Popen, name: str) -> None:
    """Kill the process of a run whose command line has ``name``."""
    (victim,) = [child for child, command in commands(process.pid).items() if name in command]
    victim.kill()


@pytest.fixture(scope="module")
def beginner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after a few episodes: how it plays does not matter."""
    out = tmp_path_factory.mktemp("beginner")
    few = ["--episodes", "8", "--epochs", "1", "--check", "0"]
    subprocess.run([sys.executable, QUICKSTART / "warm_start.py", "--out", out, *few], check=True)
    return out


@pytest.fixture(scope="module")
def runs(beginner: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Fault]]:
    """A run that gets SIGTERM after its first step; it resumes, and its engine is killed after another."""
    out = tmp_path_factory.mktemp("faults")
    first, second = out / "first", out / "second"
    faults = []
    with own_tmp() as env, started(first, *play(first, beginner), env=env) as process:
        until_step(first, process)
        message = "SIGTERM: the run stops after this step"
        faults.append(suffered("SIGTERM", process, first, env, process.terminate, message))
    with own_tmp() as env, started(second, *play(second, beginner), env=env) as process:
        until_step(second, process)
        message, harm = "died: ", partial(kill, process, "EngineCore")
        faults.append(suffered("engine killed", process, second, env, harm, message))
    return first, second, faults


def test_a_signal_ends_the_run_after_a_step_and_it_resumes_there(runs) -> None:
    first, second, faults = runs
    assert faults[0].code == 75
    log = (first / "log.txt").read_text()
    last = int((first.parent / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert f"verl-turnkey: SIGTERM: stopped after step {last}; the newest checkpoint is global_step_{last}. To" in log
    assert "main_ppo" in log.rsplit("To resume:", 1)[1]
    assert steps(first) == list(range(1, last + 1)), "the metrics of the last step are there"
    assert steps(second)[0] == last + 1


def test_a_dead_engine_ends_the_run_and_is_named(runs) -> None:
    _, second, faults = runs
    log = (second / "log.txt").read_text()
    assert faults[1].code == 69, log[-6000:]
    assert "a process died: inference server 0: its engine is dead; the newest checkpoint is global_step_" in log


PHASES = ("_compute_old_log_prob", "_compute_advantage", "_update_actor", "_save_checkpoint", "on_step_end")


@pytest.mark.long
@pytest.mark.parametrize("phase", PHASES)
def test_a_server_that_dies_in_a_phase_which_does_not_use_it_ends_the_run(phase, beginner, tmp_path) -> None:
    """``on_step_end`` copies the weights into the server. The phase outlasts two looks of the watchdog."""
    folder, out = tmp_path / "phase", tmp_path / "run"
    folder.mkdir()
    overrides = play(out, beginner, "trainer.save_freq=1")
    with own_tmp() as env:
        env |= {"TURNKEY_PHASE": phase, "TURNKEY_PHASE_FOLDER": str(folder)}
        with started(out, *overrides, modules=(HERE / "phase_pause.py",), env=env) as process:
            while not (folder / "reached").exists():
                assert process.poll() is None, (out / "log.txt").read_text()[-6000:]
                time.sleep(0.1)
            kill(process, "EngineCore")
            while (code := process.poll()) is None and phase != "on_step_end":
                time.sleep(0.1)
            (folder / "go").touch()
            code = process.wait()
    log = (out / "log.txt").read_text()
    assert code == 69, log[-6000:]
    assert "a process died: inference server 0: its engine is dead" in log


def test_the_resumed_run_plays_the_tasks_that_were_next(runs) -> None:
    """As verl's sampler deals them when nothing stops."""
    first = runs[0]
    rows = pd.read_parquet(first / "train.parquet")["turnkey_task"]
    sampler = create_rl_sampler(OmegaConf.create({"shuffle": True, "seed": None}), rows)
    order = itertools.chain.from_iterable(sampler for _ in range(1000))
    credit = read(first.parent / "log", "credit")
    played = read(first.parent / "log", "episodes").merge(credit[["episode", "train_step"]].drop_duplicates())
    groups = played.drop_duplicates("group")
    assert played.groupby("group")["episode"].nunique().eq(2).all()
    assert sorted(groups["train_step"].unique()) == list(range(1, groups["train_step"].max() + 1))
    for _, of_step in groups.groupby("train_step"):
        assert sorted(of_step["seed"]) == sorted(json.loads(rows[next(order)])["seed"] for _ in range(4))
    assert groups["segment"].nunique() == 2


def test_nothing_is_left_of_a_run_whose_driver_lived_on(runs) -> None:
    for fault in runs[2]:
        assert fault.held, "no shared memory was held"
        assert not fault.shared_memory
        assert not fault.alive


@pytest.fixture(scope="module")
def killed(beginner: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int, list[Fault]]:
    """The training process of a run is killed after its first step; then the driver of the run that resumed."""
    out = tmp_path_factory.mktemp("killed")
    first, second, every = out / "first", out / "second", "trainer.save_freq=1"
    with own_tmp() as env, started(first, *play(first, beginner, every), env=env) as process:
        until_step(first, process)
        message, harm = "a process of the run is dead", partial(kill, process, "ray::WorkerDict")
        faults = [suffered("training process killed", process, first, env, harm, message)]
    saved = int((out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    with own_tmp() as env, started(second, *play(second, beginner, every), env=env) as process:
        until_step(second, process)
        faults.append(suffered("driver killed", process, second, env, process.kill, None))
    return first, second, saved, faults


@pytest.mark.long
def test_a_dead_training_process_ends_the_run_and_the_last_checkpoint_is_resumed_from(killed) -> None:
    first, second, saved, faults = killed
    log = (first / "log.txt").read_text()
    assert faults[0].code == 69, log[-6000:]
    assert "verl-turnkey: a process of the run is dead: The actor died" in log
    assert "main_ppo" in log.rsplit("To resume:", 1)[1]
    assert steps(second)[0] == saved + 1


@pytest.mark.long
def test_of_a_killed_driver_no_process_is_left_and_doctor_finds_its_files(killed, monkeypatch) -> None:
    of_worker, of_driver = killed[3]
    assert not of_worker.alive
    assert not of_driver.alive
    assert of_worker.held
    assert not of_worker.shared_memory, "of the run whose driver lived on"
    monkeypatch.setattr(run_files, "QUIET_SECONDS", 0.0)
    left = {path for path in of_driver.shared_memory if path.exists()}
    files = {leftover.path: leftover.identity for leftover in run_files.find() if leftover.path in left}
    assert set(files) == left
    assert not run_files.remove(files)
    assert not any(path.exists() for path in left)
