"""verl's advantage step over the rows of played episodes: failed episodes and padding enter none of its statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from verl import DataProto
from verl.trainer.ppo.v1 import trainer_base


class _Controller:
    """verl's controller of the KL penalty, which gets the mean over ``rows`` of a batch's ``of`` rows.

    verl counts a row without tokens, of a failed episode or of padding, as one whose KL is 0.
    """

    def __init__(self, verls: Any, rows: int, of: int) -> None:
        self.value, self.share = verls.value, rows / of
        self._verls, self._rows = verls, rows

    def update(self, current_kl: float, n_steps: int) -> None:
        if self._rows:
            self._verls.update(current_kl=current_kl / self.share, n_steps=self._rows)


@contextmanager
def penalties_of(rows: int) -> Iterator[None]:
    """Context in which verl averages the KL of a batch, for metric and controller, over its ``rows`` with tokens."""
    verls: Any = trainer_base.apply_kl_penalty  # pyright: ignore[reportPrivateImportUsage]

    def apply(data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl") -> tuple[DataProto, dict[str, float]]:
        controller = _Controller(kl_ctrl, rows, len(data))
        data, metrics = verls(data, kl_ctrl=controller, kl_penalty=kl_penalty)
        metrics["actor/reward_kl_penalty"] /= controller.share or 1.0
        return data, metrics

    with patch.object(trainer_base, "apply_kl_penalty", apply):
        yield


@contextmanager
def advantages_of(rows: Sequence[int] | None) -> Iterator[None]:
    """Context in which verl computes advantages of these rows only: others enter none of its statistics, and get 0.

    ``rows``: None for all rows of the batch.
    """
    if rows is None:
        yield
        return
    verls: Any = trainer_base.compute_advantage_for_multi_trajectories  # pyright: ignore[reportPrivateImportUsage]

    def compute(data: DataProto, *, batch_keys: Sequence[str], **settings: Any) -> DataProto:
        part = data.select_idxs(rows)
        part = verls(part, batch_keys=[batch_keys[row] for row in rows], **settings) if len(rows) else part
        for name in ("advantages", "returns"):
            data.batch[name] = torch.zeros_like(data.batch["token_level_rewards"])
            if len(rows):
                data.batch[name][rows] = part.batch[name].to(data.batch[name].dtype)
        return data

    with patch.object(trainer_base, "compute_advantage_for_multi_trajectories", compute):
        yield
