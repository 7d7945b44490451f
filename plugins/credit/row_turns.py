"""Turns in verl's rows: the runs of ones in a response mask, and the tokens and values of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from verl_turnkey.losses.turns import Turns, like, row_offsets


@dataclass
class ParsedRows:
    """The steps that a batch of rows holds, one entry per step in each list.

    ``row``: position of its row in the batch; ``turn``: position of its turn in the row; ``reward``: the environment's,
    empty if unknown; ``columns``: columns of a StepBatch; ``extra``: its further columns by name, and ``text``;
    ``version``: newest weights version, nan if unknown; ``branch``: of its rollout, empty where none can fork;
    ``failed``: trajectory -> why it has no steps.
    """

    row: list[int] = field(default_factory=list)
    turn: list[int] = field(default_factory=list)
    reward: list[float] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
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


def token_counts(mask: torch.Tensor) -> np.ndarray:
    """Number of the model's tokens in each row of the jagged ``mask`` -> (B,) int64."""
    runs = Runs.of(mask)
    return np.bincount(runs.row, weights=runs.length, minlength=len(mask)).astype(np.int64)


@dataclass(frozen=True)
class Runs:
    """The runs of ones in a jagged response mask of B rows, numbered row after row; n in all.

    A batch has far fewer runs than tokens: what can be said of a run is not computed for each of its tokens.
    """

    mask: torch.Tensor
    start: np.ndarray
    """(n,) where each run begins in the flat mask"""
    length: np.ndarray
    """(n,) tokens of each run"""
    row: np.ndarray
    """(n,) row of each run"""
    count: np.ndarray
    """(B,) runs of each row"""
    first: np.ndarray
    """(B,) number of each row's first run; of a row without runs, the number of the next run"""

    @classmethod
    def of(cls, mask: torch.Tensor) -> Runs:
        flat, offsets = mask.values().bool().numpy(), row_offsets(mask).numpy()
        # Between two bounds all tokens are alike, and of one row.
        bounds = np.union1d(offsets, np.flatnonzero(flat[1:] != flat[:-1]) + 1)
        ones = flat[bounds[:-1]]
        start, length = bounds[:-1][ones], np.diff(bounds)[ones]
        row = np.searchsorted(offsets, start, side="right") - 1
        count = np.bincount(row, minlength=len(mask))
        return cls(mask, start, length, row, count, count.cumsum() - count)

    def spread(self, per_run: np.ndarray, outside: float) -> torch.Tensor:
        """Write one value per run, (n,), onto its tokens: jagged like the mask, ``outside`` on all others."""
        values = np.full(2 * len(per_run) + 1, outside, dtype=per_run.dtype)
        values[1::2] = per_run
        end = self.start + self.length
        times = np.zeros(len(values), dtype=np.int64)
        times[1::2] = self.length
        times[0::2] = np.append(self.start, len(self.mask.values())) - np.append(0, end)
        return like(torch.from_numpy(np.repeat(values, times)), self.mask)

    def steps(self, row: np.ndarray, turn: np.ndarray) -> np.ndarray:
        """The step that each run is of, (n,), S for none. ``row`` and ``turn``, (S,), locate the steps.

        All runs of a row with a single step belong to that step, which may have gaps (masked tokens) or no token.
        """
        of_run = np.full(len(self.start), len(row))
        alone = np.bincount(row, minlength=len(self.count))[row] == 1
        several = np.flatnonzero(~alone)
        of_run[self.first[row[several]] + turn[several]] = several
        step_of_row = np.full(len(self.count), len(row))
        step_of_row[row[alone]] = np.flatnonzero(alone)
        return np.minimum(of_run, step_of_row[self.row])

    def turns(self, of_run: np.ndarray, number: int) -> Turns:
        """The tokens of each of ``number`` steps, as turns numbered like the steps; ``of_run``: see :meth:`steps`."""
        tokens = np.bincount(of_run, weights=self.length, minlength=number + 1)[:number].astype(np.int64)
        return Turns(self.spread(of_run, number), number, torch.from_numpy(tokens))

    def owned(self, values: torch.Tensor) -> np.ndarray:
        """Sum of ``values`` (tokens,) over each run and the masked tokens behind it -> (n,) float64.

        Tokens before the first run of a row count for that run; rows without runs are left out.
        """
        none, offsets = len(self.start), row_offsets(self.mask)
        index = self.spread(np.arange(none), none).values()
        latest = torch.where(index < none, index, -1).cummax(0).values if len(index) else index
        row_of_token = torch.repeat_interleave(offsets.diff())
        owner = torch.maximum(latest, torch.from_numpy(self.first)[row_of_token])
        owner[torch.from_numpy(self.count == 0)[row_of_token]] = none
        return torch.bincount(owner, weights=values.double(), minlength=none + 1)[:none].numpy()


def jagged(padded: torch.Tensor, shape: torch.Tensor) -> torch.Tensor:
    """``padded`` (B, L) in the shape of the jagged ``shape``."""
    rows = zip(padded.unbind(), row_offsets(shape).diff().tolist(), strict=True)
    return like(torch.cat([row[:length] for row, length in rows]), shape)
