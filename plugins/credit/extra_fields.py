"""The extra fields of verl's rows, in whichever form an agent-loop manager writes them.

verl's workers write one dict per row into the column ``extra_fields``. A user's manager may write each extra field as a
column of its own, or none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDict

from verl_turnkey.plugins.credit.metrics import BREAK, CACHED, OBSERVED

COLUMN = "extra_fields"
FLAT = ("turnkey", "reward_extra_info", "turn_scores", "tool_rewards", BREAK, CACHED, OBSERVED)
"""the extra fields that the trainer reads"""
FIELDS = (COLUMN, *FLAT)
"""the columns in which they may be"""


def pop_extra_fields(data: TensorDict) -> list[Mapping[str, Any]]:
    """Remove the columns :data:`FIELDS` from ``data``; returns the extra fields of each row, empty dicts without any.

    An entry of the column ``extra_fields`` comes before a column of its name. None stands for an entry that is not
    there.
    """
    columns = {name: _values(data.pop(name)) for name in FLAT if name in data}
    nested = _values(data.pop(COLUMN)) if COLUMN in data else [{}] * len(data)
    flat = ({name: values[i] for name, values in columns.items() if values[i] is not None} for i in range(len(data)))
    return [
        {**own, **(fields if isinstance(fields, Mapping) else {})} for own, fields in zip(flat, nested, strict=True)
    ]


def _values(column: Any) -> list[Any]:
    """One entry per row; numbers arrive as tensors, all else as verl wrote it."""
    return [value.tolist() for value in column.unbind()] if isinstance(column, torch.Tensor) else column.tolist()
