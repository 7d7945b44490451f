"""The scripts of benchmarks/, and what they import of examples/, are modules by their names."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / name) for name in ("benchmarks", "benchmarks/evidence", "examples", "examples/quickstart")]

import run as run  # noqa: E402 - before a script puts the quickstart in front, which has one, too
