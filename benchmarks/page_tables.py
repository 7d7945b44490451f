"""Markdown tables of results with intervals over seeds, the pages that have them, and the packages that made them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from verl_turnkey.plugins.cli.tables import write_between


def packages() -> dict[str, str]:
    """Versions that the exact values and the credit depend on."""
    return {name: version(name) for name in ("verl-turnkey", "numpy", "torch", "minigrid")}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and bounds of its 95 % bootstrap interval over seeds."""
    numbers = np.array(values)
    means = np.random.default_rng(0).choice(numbers, (2000, len(numbers))).mean(axis=1)
    low, high = np.quantile(means, (0.025, 0.975))
    return float(numbers.mean()), float(low), float(high)


def cell(values: Sequence[float], digits: int = 2, sign: str = "") -> str:
    """:func:`interval` as text."""
    mean, low, high = (round(number, digits) + 0.0 for number in interval(values))
    return f"{mean:{sign}.{digits}f} [{low:{sign}.{digits}f}, {high:{sign}.{digits}f}]"


def write_tables(
    page: Path, results: Path, whole: Sequence[Callable[[Any], str]], contents: Mapping[str, Callable[[Any], str]]
) -> None:
    """Print the ``whole`` tables of a JSON file, and write ``contents`` into ``page``, each between its markers."""
    saved = json.loads(results.read_text())
    for make in whole:
        print(make(saved))
    for name, make in contents.items():
        write_between(page, name, make(saved))
