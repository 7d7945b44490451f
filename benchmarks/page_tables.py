"""Cells of tables with intervals over seeds, and the packages that made the results."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import numpy as np


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
