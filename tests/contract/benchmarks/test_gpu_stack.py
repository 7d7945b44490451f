"""Launch lines of the script for a GPU pass the driver, with its game; numbers are of the last step."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from contract_tools import driven

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import gpu_check
import gpu_stack


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    gpu_stack.write_model(folder, gpu_check.TINY.models["tiny"])
    return folder


@pytest.mark.parametrize(("layout", "loss"), [*product(gpu_stack.LAYOUTS, gpu_stack.ON_STACK)])
def test_a_launch_line_passes(model: Path, tmp_path: Path, layout: str, loss: str):
    overrides = gpu_stack.overrides(layout, loss, gpu_check.FULL.turns, gpu_check.FULL.answer, 4)
    command = gpu_stack.command(model, tmp_path, "cuda", overrides)
    printed = subprocess.run([*command, "--print"], capture_output=True, text=True, check=True, timeout=120).stdout
    words = shlex.split(printed.partition("verl.trainer.main_ppo")[2].replace("\\\n", " "))
    config, output = driven(words)
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"
    assert config.trainer.total_training_steps == 2
    assert "conversation" in output or layout == "row per step"
    assert loss == "vanilla" or loss in output


def test_what_is_measured_is_of_the_last_step(tmp_path: Path):
    def logged(step: int, seconds: float, **more: float) -> dict:
        parts = {"gen": seconds, "adv": 1.0, "update_actor": 6.0, "step": 10.0}
        data = {f"timing_s/{part}": value for part, value in parts.items()} | {"perf/total_num_tokens": 500} | more
        return {"step": step, "data": data}

    second = {gpu_stack.SECOND: 1.5, "perf/max_memory_allocated_gb": 20.0}
    lines = [logged(1, 99.0), logged(2, 3.0, **second)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert gpu_stack.measured(tmp_path) == {
        "tokens": 500,
        "seconds": 10.0,
        "share": 0.25,
        "gib": 20.0,
        "parts": {"gen": 3.0, "adv": 1.0, "update_actor": 6.0, "second pass": 1.5},
    }
