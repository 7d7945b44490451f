"""Tables of steps, from the records of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from verl_turnkey.plugins.credit.rows import Rows, read_rows


def nested(rows: Sequence[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.as_tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def table(records: Mapping[str, Any], mask: torch.Tensor | None = None, **more: Any) -> Rows:
    """Of rows by key, each with one token of the model if nothing is said, or one masked token if it failed."""
    if mask is None:
        mask = nested([[int(record["failed"] is None)] for record in records.values()])
    return read_rows(
        [*records], [{}] * len(records), [{"turnkey": record} for record in records.values()], mask, **more
    )
