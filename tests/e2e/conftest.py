"""The models that the end-to-end runs start from."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's model: its actions are valid, its play is poor."""
    out = tmp_path_factory.mktemp("model")
    subprocess.run([sys.executable, QUICKSTART / "warm_start.py", "--out", out], check=True)
    return out
