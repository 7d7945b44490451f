"""What ends a real run costs the steps since the checkpoint: a signal, and an inference engine that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launch import minigrid, started

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
        *overrides,
    )


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


@pytest.fixture(scope="module")
def beginner(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model after a few episodes: how it plays does not matter."""
    out = tmp_path_factory.mktemp("beginner")
    few = ["--episodes", "8", "--epochs", "1", "--check", "0"]
    subprocess.run([sys.executable, QUICKSTART / "warm_start.py", "--out", out, *few], check=True)
    return out


@pytest.fixture(scope="module")
def runs(beginner: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[int]]:
    """A run that gets SIGTERM after its first step; it resumes, and its engine is killed after another."""
    out = tmp_path_factory.mktemp("faults")
    first, second = out / "first", out / "second"
    codes = []
    with started(first, *play(first, beginner)) as process:
        until_step(first, process)
        os.kill(process.pid, signal.SIGTERM)
        codes.append(process.wait(timeout=120))
    with started(second, *play(second, beginner, "turnkey.stop.patience=8")) as process:
        until_step(second, process)
        children = psutil.Process(process.pid).children(recursive=True)
        (engine,) = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
        engine.kill()
        codes.append(process.wait(timeout=240))
    return first, second, codes


def test_a_signal_ends_the_run_after_a_step_and_it_resumes_there(runs) -> None:
    first, second, codes = runs
    assert codes[0] == 75
    said = (first / "log.txt").read_text()
    last = int((first.parent / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
    assert f"verl-turnkey: SIGTERM: stopped after step {last}; the newest checkpoint is global_step_{last}. To" in said
    assert "main_ppo" in said.rsplit("To resume:", 1)[1]
    assert steps(first) == list(range(1, last + 1)), "the metrics of the last step are there"
    assert steps(second)[0] == last + 1


def test_a_dead_engine_ends_the_run_and_is_named(runs) -> None:
    _, second, codes = runs
    said = (second / "log.txt").read_text()
    assert codes[1] == 69, said[-6000:]
    assert "and dead are: inference server 0: its engine is dead; the newest checkpoint is global_step_" in said
