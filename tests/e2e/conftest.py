"""The models that the end-to-end runs start from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The quickstart's model: its actions are valid, its play is poor. One for all processes of pytest-xdist."""
    base = tmp_path_factory.getbasetemp()
    out = (base if worker_id == "master" else base.parent) / "model"
    with FileLock(out.with_suffix(".lock")):
        if not (out / "model.safetensors").is_file():
            subprocess.run([sys.executable, QUICKSTART / "warm_start.py", "--out", out], check=True)
    return out


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of a file."""
    return tmp_path_factory.mktemp("runs")
