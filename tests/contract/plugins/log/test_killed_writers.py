"""A process that is killed while it writes tables leaves whole files."""

from __future__ import annotations

import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from verl_turnkey.plugins.view.join import read

WRITE = """
import sys, time
from itertools import count
import numpy as np
from verl_turnkey.plugins.log.writer import Tables

tables = Tables(sys.argv[1], "20261122T000000_abcd", sys.argv[2], most_puts=1)
for step in count():
    rows = np.arange(20000, dtype=np.int32)
    noise = np.random.default_rng(step).random(len(rows), dtype=np.float32)
    tables.put("updates", step, {"train_step": rows * 0 + step, "row_id": rows, "ratio": noise})
    while tables.written < 20000 * step:
        time.sleep(0.001)
"""


@pytest.mark.parametrize("more", [1, 3])
def test_what_a_killed_process_left_is_readable(tmp_path: Path, more: int):
    command = [sys.executable, "-c", WRITE, str(tmp_path)]
    processes = [subprocess.Popen([*command, f"rank{rank}"]) for rank in range(2)]
    end = time.monotonic() + 300
    try:
        while len(list(tmp_path.glob("updates/*/*.parquet"))) < 2 * more and time.monotonic() < end:
            time.sleep(0.005)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        updates = read(tmp_path, "updates")
    files = len(list(tmp_path.glob("updates/*/*.parquet")))
    assert files >= 2 * more
    assert len(updates) == 20000 * files
    assert (updates["train_step"] == updates["step"]).all()
