"""Heads of a critic: before which token of a turn each gives its value, and what it is fitted to there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from verl_turnkey.advantage import Credit, ValueHead
from verl_turnkey.losses.turns import Turns, like, row_offsets

VALUES = "values"
"""verl's field of the critic's values; the first head has it"""


def value_field(heads: Sequence[ValueHead], head: ValueHead) -> str:
    """The field of the queue with the values of ``head``, one of ``heads``, by token, jagged (B, L)."""
    return VALUES if head == heads[0] else f"turnkey_value_{head.name}"


def target_field(head: ValueHead) -> str:
    """The field of the queue with what ``head`` is fitted to, jagged (B, L); nan where it learns nothing."""
    return f"turnkey_target_{head.name}"


def positions(head: ValueHead, turns: Turns, extra: Mapping[str, Any]) -> torch.Tensor:
    """Before which token of the flat mask a head gives the value of each turn -> (n,) int64; -1: it has no tokens.

    ``extra``: the further columns of the steps. A turn that ends with its decision has its last token.
    """
    place = np.zeros(turns.n)
    for decision in reversed(head.behind):
        if f"to_{decision}" in extra:
            behind = np.nan_to_num(np.asarray(extra[f"to_{decision}"], dtype=np.float64))
            place = np.where(behind > 0, behind, place)
    index = turns.index.values()
    order = torch.argsort(index, stable=True)  # the tokens of the first turn, of the second, ...
    inside = torch.minimum(torch.from_numpy(place).long(), turns.tokens - 1)
    token = (turns.tokens.cumsum(0) - turns.tokens + inside).clamp(0, max(0, len(index) - 1))
    return torch.where(turns.tokens > 0, order[token], -1)


def head_values(
    heads: Sequence[ValueHead],
    fields: Mapping[str, torch.Tensor],
    turns: Turns,
    row: np.ndarray,
    extra: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """``value_<name>`` (S,) of each head; of a turn without tokens, at the beginning of its row."""
    columns = {}
    for head in heads:
        values, at = fields[value_field(heads, head)], positions(head, turns, extra)
        start = row_offsets(values)[torch.from_numpy(row)]
        columns[f"value_{head.name}"] = values.values()[torch.where(at < 0, start, at)].double().numpy()
    return columns


def target_columns(
    heads: Sequence[ValueHead], credit: Credit, turns: Turns, extra: Mapping[str, Any], mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The fields of :func:`target_field`, jagged float32.

    ``mask``: jagged, of the tokens that are trained; a target of a rejected token is none.
    """
    columns = {}
    for head in heads:
        target = torch.full(mask.values().shape, torch.nan)
        at = positions(head, turns, extra)
        target[at[at >= 0]] = torch.from_numpy(credit.targets[head.name]).float()[at >= 0]
        columns[target_field(head)] = like(target.masked_fill(~mask.values().bool(), torch.nan), mask)
    return columns
