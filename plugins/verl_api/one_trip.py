"""One reading and one writing of the queue for verl's advantage step and for what we add to it.

On a batch of many rows the trips to the queue take most of the time of that step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl import DataProto
from verl.trainer.ppo.v1 import trainer_base

READ = ("uid", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values")
"""the fields that verl's ``_compute_advantage`` asks the queue for, in one call"""


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
    """Meanwhile verl averages the KL of a batch, for its metric and its controller, over its ``rows`` with tokens."""
    verls: Any = trainer_base.apply_kl_penalty  # pyright: ignore[reportPrivateImportUsage]

    def apply(data: DataProto, kl_ctrl: Any, kl_penalty: str = "kl") -> tuple[DataProto, dict[str, float]]:
        controller = _Controller(kl_ctrl, rows, len(data))
        data, metrics = verls(data, kl_ctrl=controller, kl_penalty=kl_penalty)
        metrics["actor/reward_kl_penalty"] /= controller.share or 1.0
        return data, metrics

    with patch.object(trainer_base, "apply_kl_penalty", apply):
        yield


@contextmanager
def advantages_of(rows: Sequence[int]) -> Iterator[None]:
    """Meanwhile verl computes advantages of these rows alone: others enter none of its statistics, and get 0."""
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


class OneTrip:
    """Reads the rows of ``batch``; while verl's step runs, in the place of its module ``transfer_queue``.

    A call for other rows or other fields goes to the queue.
    """

    def __init__(self, batch: KVBatchMeta, ours: Sequence[str], given: Mapping[str, torch.Tensor]) -> None:
        """``ours``: the fields that we read, beside verl's; ``given``: fields that need not be read."""
        self._batch = batch
        wanted = dict.fromkeys(name for name in (*READ, *ours) if name not in given)
        data = self._from_queue([*wanted]).update(given)
        self.data = data.select(*(name for name in ours if name in data))
        """our fields, of those that the rows have"""
        self._verls: TensorDict | None = data.select(*(name for name in READ if name in data))
        self.written: dict[str, Any] = {}
        """the columns that go to the queue: verl's, to which we add ours"""

    def _from_queue(self, fields: list[str]) -> TensorDict:
        return tq.kv_batch_get(
            keys=self._batch.keys,
            partition_id=self._batch.partition_id,  # pyright: ignore[reportArgumentType]
            select_fields=fields,
        )

    @property
    def now(self) -> dict[str, Any]:
        """Our fields as the queue will have them: a rejection changes ``response_mask``."""
        return {**dict(self.data.items()), **self.written}

    def put(self) -> KVBatchMeta:
        fields = TensorDict(self.written, batch_size=len(self._batch))
        return tq.kv_batch_put(
            keys=self._batch.keys,
            partition_id=self._batch.partition_id,  # pyright: ignore[reportArgumentType]
            fields=fields,
        )

    # --- what verl's module calls -----------------------------------------------------------------------------------

    @contextmanager
    def for_verl(self, rows: Sequence[int] | None = None) -> Iterator[None]:
        """``rows``: the rows whose advantages verl computes, all others get 0; None: all rows."""
        with patch.object(trainer_base, "tq", self), nullcontext() if rows is None else advantages_of(rows):
            yield

    def __getattr__(self, name: str) -> Any:
        return getattr(tq, name)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        if self._verls is None or keys != self._batch.keys or not {*select_fields} <= {*READ}:
            return tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=select_fields)
        data, self._verls = self._verls, None  # verl pads its fields, and these are then freed
        return data.select(*(name for name in select_fields if name in data))

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict, **more: Any) -> KVBatchMeta:
        if keys != self._batch.keys or more:
            return tq.kv_batch_put(keys=keys, partition_id=partition_id, fields=fields, **more)
        self.written.update(fields.items())
        return self._batch
