"""The script that plays many episodes at once, with a few."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


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
