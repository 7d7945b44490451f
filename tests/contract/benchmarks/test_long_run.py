"""What the script on long runs makes of what it wrote down."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import long_run


def lines(path: Path, entries: list[dict]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Killed after step 30, gone on from 21, ended after 60; the driver gains 2 MB in 100 steps, in each start."""
    starts = ((1000.0, 0, 30, True), (5000.0, 30, 60, False))
    lines(
        tmp_path / "starts.jsonl",
        [
            {
                "began": began,
                "ended": began + 3600,
                "killed": killed,
                "code": 0,
                "first": first,
                "last": last,
                "left": 0,
            }
            for began, first, last, killed in starts
        ],
    )
    looks = [(start, step) for start, (first, last) in enumerate(((0, 30), (30, 60))) for step in range(first, last)]
    lines(
        tmp_path / "samples.jsonl",
        [
            {
                "start": start,
                "step": step,
                "memory": {"driver": 500 + 100 * start + step * 0.02},
                "processes": {"driver": 1},
                "files": 10 + step,
                "disk": 2.0,
                "shared": 3,
            }
            for start, step in looks
        ],
    )
    for began, steps in ((1001, range(1, 31)), (5001, range(21, 61))):
        data = {"episode/count": 64.0, "episode/failed": 2.0, "episode/success_rate": 0.5}
        entries = [{"step": step, "data": data} for step in steps]
        lines(tmp_path / f"metrics-{began * 10**9}.jsonl", entries)
    return tmp_path


def test_memory_is_compared_within_each_start(out: Path) -> None:
    [row] = long_run.grown(out).splitlines()[2:]
    assert row == "| driver | 1 | 500 | 601 | +2.0 |"


def test_what_a_kill_cost_is_counted(out: Path) -> None:
    summary = long_run.lost(out)
    assert "steps: 60, started 2 times, 2.0 hours" in summary
    assert "episodes: 3840, of which 120 failed" in summary
    assert "killed after step 30: 10 steps were trained again" in summary


def test_the_picture_is_drawn(out: Path, tmp_path: Path) -> None:
    long_run.draw([out, out], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("line", "role"),
    [
        ("ray::TaskRunnerV1.run", "driver"),
        ("python -m verl.trainer.main_ppo +turnkey=gigpo", "launcher"),
        ("ray::AgentLoopWorkerTQ", "agent-loop workers"),
        ("VLLM::EngineCore", "vLLM engines"),
        ("ray::vLLMHttpServer", "vLLM servers"),
        ("ray::TransferQueueController", "TransferQueue"),
        ("python lib/site-packages/ray/core/src/ray/raylet/raylet --x", "Ray"),
        ("ray::IDLE", "Ray"),
        ("sleep 1", "other"),
    ],
)
def test_processes_are_told_apart(line: str, role: str) -> None:
    assert long_run.role_of(SimpleNamespace(cmdline=line.split)) == role
