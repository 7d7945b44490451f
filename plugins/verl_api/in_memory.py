"""The rows of a batch in the trainer's own memory: the ``DataProto`` of verl's older trainer, without TransferQueue.

``RayPPOTrainer`` passes such a batch from step to step. Its columns of tokens are padded on the right to one length,
and everything that is not a tensor is a column of objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict
from verl import DataProto
from verl.utils.tensordict_utils import assign_non_tensor_stack
from verl.workers.utils.padding import response_to_nested

OF_VERL = ("advantages", "returns", "token_level_rewards", "response_mask", "rollout_is_weights")
"""columns that verl's advantage step may write, depending on the configuration"""


class InMemory:
    """The rows of ``data`` as the advantage step reads and writes them; like :class:`.queue.OneTrip`.

    Args:
        data: with ``response_mask`` (B, L), ``attention_mask`` (B, P + L) and verl's rewards ``rm_scores`` (B, L).
        keys: ``{uid}_{session}_{index}`` of each row.
        tags: of each row, ``is_padding`` and ``seq_len`` among them.
        ours: the fields that we read, if the rows have them.
    """

    def __init__(self, data: DataProto, keys: list[str], tags: list[dict[str, Any]], ours: Sequence[str]) -> None:
        self._all, self.keys, self.tags = data, keys, tags
        mask = data.batch["response_mask"]
        lengths = data.batch["attention_mask"][:, -mask.shape[1] :].sum(1).tolist()
        self._shape = torch.nested.as_nested_tensor(
            [row[:length] for row, length in zip(mask, lengths, strict=True)], layout=torch.jagged
        )
        self.data = TensorDict({}, batch_size=len(keys))
        for name in ours:
            if name in data.batch:
                self.data[name] = self._jagged(data.batch[name])
            elif name in data.non_tensor_batch:
                assign_non_tensor_stack(self.data, name, list(data.non_tensor_batch[name]))
        self.written: dict[str, Any] = {}

    def _jagged(self, column: torch.Tensor) -> torch.Tensor:
        """(B, L) without its padding; a column with a number per row is unchanged."""
        return response_to_nested(column, self._shape) if column.ndim == 2 else column

    @property
    def now(self) -> dict[str, Any]:
        """Our fields as they will be in the batch."""
        return {**dict(self.data.items()), **self.written}

    @contextmanager
    def for_verl(self) -> Iterator[None]:
        """Context in which verl's advantage step works on the batch."""
        yield
        columns: Mapping[str, torch.Tensor] = self._all.batch
        self.written |= {name: self._jagged(columns[name]) for name in OF_VERL if name in columns}

    def put(self) -> DataProto:
        """The batch with all columns that were written, padded with zeros."""
        size = tuple(self._all.batch["response_mask"].shape)
        for name, column in self.written.items():
            padded = column.to_padded_tensor(0, output_size=size) if column.is_nested else column
            self._all.batch[name] = padded
        return self._all
