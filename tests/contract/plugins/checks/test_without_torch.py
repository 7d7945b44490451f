"""``turnkey check`` says without torch of every line what it says with all of verl."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from driving import driving, printed_by
from launch_lines import STARTS, filled, write_files

from verl_turnkey.plugins.config.recipe_files import rule_texts

HERE = Path(__file__).parent


def lines() -> list[str]:
    """A line for each rule, lines that start, and one whose environment is played."""
    tripping = [rule["trips"] for rule in rule_texts().values() if "trips" in rule]
    unplayed = [f"{line} turnkey.env.probe=false" if "+turnkey=" in line else line for line in [*tripping, *STARTS]]
    return [*unplayed, "+turnkey=gigpo +turnkey/env=babyai"]


def lasting(text: str) -> str:
    """Without the names that a start draws."""
    return re.sub(r"\d{8}-\d{6}-\w+|0x[0-9a-f]+", "*", text)


@pytest.mark.timeout(900)
def test_every_line_is_told_the_same(model_dir: Path, tmp_path: Path):
    files = write_files(tmp_path, model_dir)
    typed = [filled(line, files) for line in lines()]
    ran = subprocess.run(
        [sys.executable, str(HERE / "driving.py")], input=json.dumps(typed), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    quick = dict(zip(typed, json.loads(ran.stdout.splitlines()[-1]), strict=True))
    with driving() as drive:
        whole = {line: printed_by(drive, line) for line in typed}
    needing = [line for line, text in quick.items() if text.startswith("needs ")]
    differing = {line: (quick[line], whole[line]) for line in quick if lasting(quick[line]) != lasting(whole[line])}
    unlike = {line: (quick[line], whole[line]) for line in differing.keys() ^ {*needing}}
    assert not unlike
    assert len(needing) < len(typed) / 6
