"""The only access to verl's TransferQueue: every row that this package reads, writes or clears passes here.

No other file of the package imports ``transfer_queue``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

READ = ("uid", "response_mask", "rm_scores", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values")
"""the fields that verl's ``_compute_advantage`` requests from the queue, in a single call"""

CONTROLLER, NAMESPACE = "TransferQueueController", "transfer_queue"
"""under which the queue names its controller in Ray"""


def controller() -> Any:
    """The handle of the actor that every call to the queue waits for; None without one. Ray knows no dead ones."""
    try:
        return ray.get_actor(CONTROLLER, namespace=NAMESPACE)
    except ValueError:
        return None


@dataclass(frozen=True)
class Partition:
    """The rows in the queue under one name: verl's ``train`` and ``val``, or one of ours."""

    name: str

    def read(self, keys: Sequence[str], fields: Sequence[str] | None = None) -> TensorDict:
        """Columns of the rows in the order of ``keys``: those of ``fields`` (None: all) that all of the rows have.

        Raises:
            ValueError: there is no such row, or it has none of the fields.
        """
        select = None if fields is None else list(fields)
        return tq.kv_batch_get(keys=list(keys), partition_id=self.name, select_fields=select)

    def write(self, keys: Sequence[str], columns: Mapping[str, Any]) -> KVBatchMeta:
        """Write columns of the rows, (n, ...) or jagged (n, L); other columns stay."""
        fields = TensorDict(dict(columns), batch_size=len(keys))
        return tq.kv_batch_put(keys=list(keys), partition_id=self.name, fields=fields)

    def write_rows(self, keys: Sequence[str], rows: list[dict[str, Any]], tags: list[dict[str, Any]]) -> KVBatchMeta:
        """Add rows with the same fields: a field that one of them lacks would vanish from all rows."""
        return tq.kv_batch_put(
            keys=list(keys), partition_id=self.name, fields=list_of_dict_to_tensordict(rows), tags=tags
        )

    def clear(self, keys: Sequence[str]) -> None:
        """Remove the rows."""
        tq.kv_clear(keys=list(keys), partition_id=self.name)

    def tags(self) -> dict[str, dict[str, Any]]:
        """The tags of all rows by key; verl keeps a prompt as a row without fields."""
        return (tq.kv_list(self.name) or {}).get(self.name, {})

    def fields(self, keys: Sequence[str]) -> list[str]:
        """Names of the fields that all of the rows have."""
        meta = tq.get_client().kv_retrieve_meta(keys=list(keys), partition_id=self.name, create=False)
        return list(meta.field_names)


def partition_of(batch: KVBatchMeta) -> Partition:
    """The partition that holds the rows of ``batch``."""
    assert batch.partition_id is not None, "verl names the partition of every batch"
    return Partition(batch.partition_id)


def fields_of(batch: KVBatchMeta) -> list[str]:
    """Names of the fields that a worker call on ``batch`` gets.

    In a batch fresh from the replay buffer ``batch.fields`` is None, which verl reads as "all".
    """
    return list(batch.fields) if batch.fields is not None else partition_of(batch).fields(batch.keys)


def batch_of(partition_id: str, tags: Mapping[str, dict[str, Any]]) -> KVBatchMeta:
    """The rows with these keys and tags as a batch, as the replay buffer hands it out."""
    return KVBatchMeta(keys=[*tags], tags=[*tags.values()], partition_id=partition_id)


def part_of(batch: KVBatchMeta, rows: Sequence[int]) -> KVBatchMeta:
    """The rows of ``batch`` at these positions, in their order."""
    part = replace(batch, keys=[batch.keys[i] for i in rows], tags=[batch.tags[i] for i in rows])
    part.extra_info = part.extra_info or {}
    return part


def with_rows(batch: KVBatchMeta, keys: Sequence[str], tags: Sequence[dict[str, Any]]) -> KVBatchMeta:
    """``batch`` and further rows of its partition behind its own."""
    return replace(batch, keys=[*batch.keys, *keys], tags=[*batch.tags, *tags])


class OneTrip:
    """Reads and writes the rows of ``batch`` once, for verl's advantage step and for ours.

    On a batch of many rows that step spends most of its time in calls to the queue. While verl's step runs, this object
    replaces its module ``transfer_queue``; calls for other rows or other fields go to the queue.
    """

    def __init__(self, batch: KVBatchMeta, ours: Sequence[str], known: Mapping[str, torch.Tensor]) -> None:
        """``ours``: the fields that we read besides verl's; ``known``: fields that need not be read."""
        self._batch, self.keys, self.tags = batch, batch.keys, batch.tags
        wanted = dict.fromkeys(name for name in (*READ, *ours) if name not in known)
        data = partition_of(batch).read(batch.keys, [*wanted]).update(known)
        self.data = data.select(*(name for name in ours if name in data))
        """our fields, if the rows have them"""
        self._verls: TensorDict | None = data.select(*(name for name in READ if name in data))
        self.written: dict[str, Any] = {}
        """the columns to write to the queue: verl's, to which we add ours"""

    @property
    def now(self) -> dict[str, Any]:
        """Our fields as they will be in the queue: a rejection changes ``response_mask``."""
        return {**dict(self.data.items()), **self.written}

    def put(self) -> KVBatchMeta:
        return partition_of(self._batch).write(self._batch.keys, self.written)

    # --- what verl's module calls -----------------------------------------------------------------------------------

    @contextmanager
    def for_verl(self) -> Iterator[None]:
        """Context in which verl's advantage step reads and writes here."""
        from verl.trainer.ppo.v1 import trainer_base

        with patch.object(trainer_base, "tq", self):
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
