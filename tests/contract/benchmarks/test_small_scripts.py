"""The scripts that benchmarks/results/README.md names and that have no file of tests of their own, at their least."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from verl_turnkey.advantage import estimators

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "benchmarks"))


def run(script: str, *arguments: str) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


def rows(printed: str) -> list[list[str]]:
    """Cells of the Markdown tables, without headers."""
    lines = re.findall(r"^\|(?! *-)(.*)\|$", printed, re.M)
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return [row for row in cells if re.fullmatch(r"[\d.,]+", row[-1])]


def test_every_estimator_and_its_naive_twin_are_timed(monkeypatch, capsys) -> None:
    import estimators as benchmark

    monkeypatch.setattr(benchmark, "TURNS", (2, 9))
    benchmark.compare_estimators((1, 2))
    benchmark.compare_similarity(rows=60, naive_rows=60)
    printed = capsys.readouterr().out
    timings = {
        cells[0]: cells[1:]
        for line in re.findall(r"^\| (?!what)(.*) \|$", printed, re.M)
        if (cells := line.split(" | "))
    }
    assert {*timings} == {"write of the tensor", *(f"`{name}`" for name in estimators()), "verl's `grpo`, vectorized"}
    for name in estimators():
        _, *seconds, times_write, _, growth, memory = (float(cell.replace(",", "")) for cell in timings[f"`{name}`"])
        assert len(seconds) == 2
        assert min(*seconds, times_write, growth, memory) > 0
    assert "similarity >= 0.9 at 60 rows" in printed


def test_a_batch_is_dealt_by_both_rules(capsys) -> None:
    import dealing

    dealing.main(rows=512, ranks=2, number=2)
    printed = capsys.readouterr().out
    assert len(re.findall(r"^ +(ours|verl) .* advantage .* cut \d", printed, re.M)) == 4


def test_episodes_are_logged(capsys) -> None:
    import trajectory_log

    trajectory_log.main(count=4, turns=2, per_group=2)
    assert capsys.readouterr().out.startswith("4 episodes of 2 turns, ")


def test_prompts_of_three_kinds_pass_through_the_engine(tmp_path) -> None:
    *costs, ratios = rows(run("layouts.py", "--turns", "4", "--out", str(tmp_path)))
    assert ratios[0] == "4"
    of_kind = {cells[1]: cells for cells in costs}
    assert {kind: cells[2] for kind, cells in of_kind.items()} == {
        "template, history 2": "4",
        "template, full history": "4",
        "conversation": "1",
    }
    tokens = {kind: int(cells[3].replace(",", "")) for kind, cells in of_kind.items()}
    assert tokens["template, full history"] > tokens["template, history 2"] > tokens["conversation"]
    assert (tmp_path / "summary.json").is_file()


def test_a_host_is_beside_a_direct_call() -> None:
    table = rows(run("env_hosts.py", "--steps", "20", "--episodes", "2"))
    assert len(table) == 5
    direct, *hosted = (float(cells[1]) for cells in table)
    assert 0 < direct < min(hosted)


@pytest.mark.parametrize("script", ["prefix_cache", "stability", "view_page"])
def test_what_takes_long_is_at_least_importable(script: str) -> None:
    """A run of them would be real training or a browser's page."""
    __import__(script)
