"""The script that times the whole advantage step, on a few rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import transfer_queue as tq
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_turnkey.plugins.trainer.trainer import TurnkeyTrainerSync

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import advantage_step as benchmark


@pytest.mark.parametrize("extras", [(), benchmark.EXTRAS], ids=["plain", "extras"])
def test_both_drivers_run_on_the_same_rows(queue, extras) -> None:
    rows = 120
    batch = benchmark.fill(rows, tokens=6)
    assert len(batch.keys) == rows
    for trainer, config in (
        (PPOTrainerSync, benchmark.configuration("grpo", rows)),
        (TurnkeyTrainerSync, benchmark.configuration("gigpo", rows, extras)),
    ):
        took = benchmark.Took()
        benchmark.drive(benchmark.make_trainer(trainer, config), batch, took)
        *seconds, cpu, memory = took.row()
        assert seconds[2] == pytest.approx(seconds[0] + seconds[1])
        assert min(*seconds, cpu) > 0
        assert 0 <= memory < 1
    assert len(tq.kv_list("train")["train"]) == rows  # no padding is left for the next repeat


def test_the_processes_of_the_queue_are_found(queue) -> None:
    assert len(benchmark.queue_processes()) >= 2


def test_credit_alone_runs(capsys) -> None:
    benchmark.credit_alone(60, 20)
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["gigpo", "turn_gae"]
