"""Turns in verl's rows: runs of ones in a response mask, and what belongs to each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch


@dataclass
class Found:
    """The steps that a batch of rows holds, one entry per step in each list.

    ``row``: position of its row in the batch; ``turn``: of its turn in the row; ``columns``: those of a StepBatch, an
    estimator's ``needs`` apart; ``extra``: further ones by name; ``failed``: trajectory -> why it holds no steps.
    """

    row: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    columns: dict[str, Sequence[Any]] = field(default_factory=dict)
    extra: dict[str, Sequence[Any]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def split_key(key: str) -> tuple[str, str, int]:
    """``{uid}_{session}_{index}`` to (group, trajectory, index)."""
    group, session, index = key.rsplit("_", 2)
    return group, f"{group}_{session}", int(index)


def record_of(extra_fields: Any) -> Any:
    """What an agent loop left as the record of a row, unchecked; None when it left nothing."""
    return extra_fields.get("turnkey") if isinstance(extra_fields, Mapping) else None


def turn_counts(ids: torch.Tensor) -> list[int]:
    """Number of turns in each row of ``ids`` (B, L)."""
    return (ids.max(1).values + 1).tolist() if ids.numel() else [0] * len(ids)


def sum_by_turn(values: torch.Tensor, ids: torch.Tensor, row: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """Sums of ``values`` (B, L) over the tokens whose id in ``ids`` (B, L) is that of the step -> (S,) float64."""
    if not len(row):
        return np.zeros(0)
    width = int(max(ids.max(), turn.max())) + 2  # a turn without a token has no id of its own
    table = torch.zeros(len(ids), width, dtype=torch.float64)
    table.scatter_add_(1, ids + 1, values.double())
    return table.numpy()[row, turn + 1]


def at_turn_start(values: torch.Tensor, ids: torch.Tensor, row: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """The entry of ``values`` (B, L) at the first token of each step -> (S,) float64."""
    if not len(row):
        return np.zeros(0)
    width = int(max(ids.max(), turn.max())) + 2  # as in sum_by_turn
    length = ids.shape[1]
    positions = torch.arange(length).expand_as(ids)
    first = torch.full((len(ids), width), length).scatter_reduce_(1, ids + 1, positions, "amin")
    first[first == length] = 0  # a turn without a token
    return values.gather(1, first).double().numpy()[row, turn + 1]
