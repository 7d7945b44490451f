"""The scripts that measure what credit costs and how rollouts scale, on little data."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_turnkey.plugins.cli.tables import shipped
from verl_turnkey.plugins.trainer.trainer import TurnkeyTrainerSync

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))

import advantage_step  # noqa: E402
import estimators  # noqa: E402


def test_every_estimator_and_its_naive_twin_are_timed(monkeypatch, capsys) -> None:
    monkeypatch.setattr(estimators, "TURNS", (2, 9))
    estimators.compare_estimators((1, 2))
    estimators.compare_similarity(rows=60, naive_rows=60)
    printed = capsys.readouterr().out
    timings = {
        cells[0]: cells[1:]
        for line in re.findall(r"^\| (?!what)(.*) \|$", printed, re.M)
        if (cells := line.split(" | "))
    }
    others = {"write of the tensor", estimators.WORDS, "verl's `grpo`, vectorized"}
    assert {*timings} == {*others, *(f"`{name}`" for name in shipped())}
    assert re.search(r"loo_td takes [\d.]+ times as long as gigpo, and [\d.]+ times with words", printed)
    for name in shipped():
        _, *seconds, times_write, _, growth, memory = (float(cell.replace(",", "")) for cell in timings[f"`{name}`"])
        assert len(seconds) == 2
        assert min(*seconds, times_write, growth, memory) > 0
    assert "similarity >= 0.9 at 60 rows" in printed


@pytest.mark.parametrize("extras", [(), advantage_step.EXTRAS], ids=["plain", "extras"])
def test_both_drivers_run_on_the_same_rows(queue, extras) -> None:
    rows = 120
    batch = advantage_step.fill(rows, tokens=6)
    assert len(batch.keys) == rows
    for trainer, config in (
        (PPOTrainerSync, advantage_step.configuration("grpo", rows)),
        (TurnkeyTrainerSync, advantage_step.configuration("gigpo", rows, extras)),
    ):
        took = advantage_step.Took()
        advantage_step.drive(advantage_step.make_trainer(trainer, config), batch, took)
        *seconds, cpu, memory = took.row()
        assert seconds[2] == pytest.approx(seconds[0] + seconds[1])
        assert min(*seconds, cpu) > 0
        assert 0 <= memory < 1
    assert len(tq.kv_list("train")["train"]) == rows  # no padding is left for the next repeat


def test_the_processes_of_the_queue_are_found(queue) -> None:
    assert len(advantage_step.queue_processes()) >= 2


def test_credit_alone_runs(capsys) -> None:
    advantage_step.credit_alone(60, 20)
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["gigpo", "turn_gae"]


@pytest.mark.long
def test_a_wave_makes_its_environments_and_the_next_one_finds_them():
    command = [sys.executable, str(ROOT / "benchmarks" / "rollout_scale.py"), "--place", "process", "--workers", "2"]
    command += ["--episodes", "4", "--turns", "3", "--turn-seconds", "0.05"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-2000:]
    header, new, warm = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\| .*", ran.stdout, re.M)
    )
    rows = [dict(zip(header, row, strict=True)) for row in (new, warm)]
    assert [row["environments"] for row in rows] == ["new", "warm"]
    for row in rows:
        assert (row["episodes"], row["failed"]) == ("4", "0")
        assert float(row["wall / ideal"]) >= 1.0
        assert float(row["wall s"]) >= float(row["ideal s"]) > 0
        assert float(row["CPU of the loop, ms a turn"]) > 0
    # An interpreter with gymnasium each, which stay.
    assert float(rows[0]["hosts, MB an episode"]) > 5 > float(rows[1]["hosts, MB an episode"])
    assert "processes left behind: 0" in ran.stdout
