"""What ends a real run costs the steps since the checkpoint: a signal, and processes that die.

With ``-s`` the seconds from the fault to the end of the run are printed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
from launch import minigrid, started
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import create_rl_sampler

from verl_turnkey.plugins.seeing.reading import read
from verl_turnkey.plugins.stopping import leftovers

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
LEVEL = {"level": "MiniGrid-DoorKey-5x5-v0", "max_steps": 5}


def play(out: Path, model: Path, *overrides: str) -> tuple[str, ...]:
    return (
        "+turnkey=gigpo",
        "+turnkey/env=babyai",
        "+turnkey/device=cpu",
        *minigrid(out, LEVEL, train=16, val=4, seed=0),
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.save_freq=1000",
        "trainer.total_training_steps=1000",
        f"trainer.default_local_dir={out.parent}/checkpoints",
        f"turnkey.log.trajectories={out.parent}/log",
        *overrides,
    )


def shared_memory(process: subprocess.Popen) -> set[Path]:
    """What the processes of a run hold of it."""
    found = set()
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(OSError):
            for file in Path(f"/proc/{each.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    found.add(file.readlink())
    return {path for path in found if path.match("/dev/shm/psm_*") and path.exists()}


def steps(out: Path) -> list[int]:
    file = out / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def until_step(out: Path, process: subprocess.Popen) -> int:
    """The newest step whose metrics are there."""
    for _ in range(6000):
        if found := steps(out):
            return found[-1]
        assert process.poll() is None, (out / "log.txt").read_text()[-6000:]
        time.sleep(0.1)
    pytest.fail((out / "log.txt").read_text()[-6000:])


def kill(process: subprocess.Popen, name: str) -> None:
    """Kill the process of a run whose command line has ``name``."""
    children = psutil.Process(process.pid).children(recursive=True)
    (one,) = [child for child in children if name in " ".join(child.cmdline())]
    one.kill()


def ended(what: str, process: subprocess.Popen) -> int:
    """The exit status of a run that ends after ``what``."""
    began = time.monotonic()
    code = process.wait(timeout=240)
    print(f"{what}: the run ended {time.monotonic() - began:.1f} s later, with status {code}")
    return code


@pytest.fixture(scope="module")
def beginner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after a few episodes: how it plays does not matter."""
    out = tmp_path_factory.mktemp("beginner")
    few = ["--episodes", "8", "--epochs", "1", "--check", "0"]
    subprocess.run([sys.executable, QUICKSTART / "warm_start.py", "--out", out, *few], check=True)
    return out


@pytest.fixture(scope="module")
def runs(beginner: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[int], set[Path]]:
    """A run that gets SIGTERM after its first step; it resumes, and its engine is killed after another."""
    out = tmp_path_factory.mktemp("faults")
    first, second = out / "first", out / "second"
    codes, held = [], set()
    with started(first, *play(first, beginner)) as process:
        until_step(first, process)
        held |= shared_memory(process)
        os.kill(process.pid, signal.SIGTERM)
        codes.append(ended("SIGTERM", process))
    with started(second, *play(second, beginner, "turnkey.stop.patience=8")) as process:
        until_step(second, process)
        held |= shared_memory(process)
        kill(process, "EngineCore")
        codes.append(ended("the engine is killed", process))
    return first, second, codes, held


def test_a_signal_ends_the_run_after_a_step_and_it_resumes_there(runs) -> None:
    first, second, codes, _ = runs
    assert codes[0] == 75
    said = (first / "log.txt").read_text()
    last = int((first.parent / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert f"verl-turnkey: SIGTERM: stopped after step {last}; the newest checkpoint is global_step_{last}. To" in said
    assert "main_ppo" in said.rsplit("To resume:", 1)[1]
    assert steps(first) == list(range(1, last + 1)), "the metrics of the last step are there"
    assert steps(second)[0] == last + 1


def test_a_dead_engine_ends_the_run_and_is_named(runs) -> None:
    _, second, codes, _ = runs
    said = (second / "log.txt").read_text()
    assert codes[1] == 69, said[-6000:]
    assert "and dead are: inference server 0: its engine is dead; the newest checkpoint is global_step_" in said


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


def test_no_shared_memory_is_left(runs) -> None:
    *_, held = runs
    assert held
    assert not [path for path in held if path.exists()]


@pytest.fixture(scope="module")
def killed(beginner: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """The training process of a run is killed after its first step; then the driver of the run that resumed."""
    out = tmp_path_factory.mktemp("killed")
    first, second, every = out / "first", out / "second", "trainer.save_freq=1"
    with started(first, *play(first, beginner, every)) as process:
        until_step(first, process)
        cleaned = shared_memory(process)
        kill(process, "ray::WorkerDict")
        code = ended("the training process is killed", process)
    saved = int((out / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    with started(second, *play(second, beginner, every)) as process:
        until_step(second, process)
        held = shared_memory(process)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        ended("the driver is killed", process)
        began = time.monotonic()
        _, alive = psutil.wait_procs(children, timeout=300)  # Ray's agents look seldom whether their node is there
        print(f"its {len(children)} processes were gone {time.monotonic() - began:.1f} s after it")
    return first, second, code, saved, cleaned, held, alive


def test_a_dead_training_process_ends_the_run_and_the_last_checkpoint_is_resumed_from(killed) -> None:
    first, second, code, saved, *_ = killed
    said = (first / "log.txt").read_text()
    assert code == 69, said[-6000:]
    assert "verl-turnkey: a process of the run is dead: The actor died" in said
    assert "main_ppo" in said.rsplit("To resume:", 1)[1]
    assert steps(second)[0] == saved + 1


def test_of_a_killed_driver_no_process_is_left_and_doctor_finds_its_files(killed, monkeypatch) -> None:
    *_, cleaned, held, alive = killed
    assert not alive
    assert not any(path.exists() for path in cleaned), "of the run whose driver lived on"
    monkeypatch.setattr(leftovers, "QUIET_SECONDS", 0.0)
    left = {path for path in held if path.exists()}
    found = {each.path: each.identity for each in leftovers.find() if each.path in left}
    assert set(found) == left
    assert not leftovers.remove(found)
    assert not any(path.exists() for path in left)
