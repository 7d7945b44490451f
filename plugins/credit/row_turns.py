"""Turns in verl's rows: the runs of ones in a response mask, and the tokens and values of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl_turnkey.losses.turns import Turns, like, run_starts


@dataclass
class Found:
    """The steps that a batch of rows holds, one entry per step in each list.

    ``row``: position of its row in the batch; ``turn``: position of its turn in the row; ``columns``: columns of a
    StepBatch; ``extra``: its further columns by name, and ``text``; ``version``: newest weights version, nan if
    unknown; ``branch``: of its rollout, empty where none can fork; ``failed``: trajectory -> why it has no steps.
    """

    row: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    columns: dict[str, Sequence[Any]] = field(default_factory=dict)
    extra: dict[str, Sequence[Any]] = field(default_factory=dict)
    version: list[float] = field(default_factory=list)
    branch: list[int] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)


def split_key(key: str) -> tuple[str, str, int]:
    """``{uid}_{session}_{index}`` to (group, trajectory, index)."""
    group, session, index = key.rsplit("_", 2)
    return group, f"{group}_{session}", int(index)


def branch_name(episode: str, branch: int) -> str:
    """The trajectory that is the branch of a rollout ``{uid}_{session}``; the first one has the rollout's name."""
    return f"{episode}.{branch}" if branch else episode


def record_of(extra_fields: Any) -> Any:
    """The record that the agent loop wrote for a row, unchecked; None without one."""
    return extra_fields.get("turnkey") if isinstance(extra_fields, Mapping) else None


def token_counts(mask: torch.Tensor) -> torch.Tensor:
    """Number of the model's tokens in each row of the jagged ``mask`` -> (B,) int64."""
    before = torch.nn.functional.pad(mask.values().bool().cumsum(0), (1, 0))
    return before[mask.offsets()].diff()


@dataclass(frozen=True)
class Runs:
    """The runs of ones in a jagged response mask of B rows, numbered row after row; n in all."""

    turns: Turns
    count: np.ndarray
    """(B,) runs of each row"""
    first: np.ndarray
    """(B,) number of each row's first run; of a row without runs, the number of the next run"""

    @classmethod
    def of(cls, mask: torch.Tensor) -> Runs:
        turns = Turns.of(mask)
        row = torch.searchsorted(mask.offsets(), run_starts(mask), right=True) - 1
        count = torch.bincount(row, minlength=len(mask)).numpy()
        return cls(turns, count, count.cumsum() - count)

    def as_steps(self, row: np.ndarray, turn: np.ndarray) -> Turns:
        """The tokens of each step, as turns numbered like the steps. ``row`` and ``turn``, (S,), locate the steps.

        All runs of a row with a single step belong to that step, which may have gaps (masked tokens) or no token.
        """
        of_run = np.full(self.turns.n + 1, len(row))  # the last entry: tokens outside of all runs
        alone = np.bincount(row, minlength=len(self.count))[row] == 1
        several = np.flatnonzero(~alone)
        of_run[self.first[row[several]] + turn[several]] = several
        step_of_row = np.full(len(self.count), len(row))
        step_of_row[row[alone]] = np.flatnonzero(alone)
        of_run[:-1] = np.minimum(of_run[:-1], step_of_row[np.repeat(np.arange(len(self.count)), self.count)])
        if np.array_equal(of_run, np.arange(len(row) + 1)):
            return self.turns  # a row per step, as most batches are
        index = torch.from_numpy(of_run)[self.turns.index.values()]
        tokens = torch.bincount(index, minlength=len(row) + 1)[: len(row)]
        return Turns(like(index, self.turns.index), len(row), tokens)

    def owned(self, values: torch.Tensor) -> np.ndarray:
        """Sum of ``values`` (tokens,) over each run and the masked tokens behind it -> (n,) float64.

        Tokens before the first run of a row count for that run; rows without runs are left out.
        """
        index, none = self.turns.index.values(), self.turns.n
        latest = torch.where(index < none, index, -1).cummax(0).values if len(index) else index
        row_of_token = torch.repeat_interleave(self.turns.index.offsets().diff())
        owner = torch.maximum(latest, torch.from_numpy(self.first)[row_of_token])
        owner[torch.from_numpy(self.count == 0)[row_of_token]] = none
        return torch.bincount(owner, weights=values.double(), minlength=none + 1)[:none].numpy()


def jagged(padded: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """``padded`` (B, L) in the shape of the jagged ``shape``."""
    rows = zip(padded.unbind(), shape.offsets().diff().tolist(), strict=True)
    return like(torch.cat([row[:length] for row, length in rows]), shape)
