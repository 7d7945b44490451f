"""Turns of a response mask, and sums and means over them: no loop over rows, padded or jagged.

A turn is a maximal run of ones in a row of the mask. Adjacent turns would count as one: the writer of the mask must
leave at least one masked token between them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def turn_ids(mask: Tensor) -> Tensor:
    """Number the runs of ones in each row of ``mask``: 0, 1, ... on the runs, -1 off the model's tokens.

    ``mask`` is (B, L), or jagged (a nested tensor with layout ``torch.jagged``) of B rows; any dtype that reads as
    bool. The result has the same shape and layout, int64. Rows without a one are all -1.
    """
    flat, row_start, starts = _runs(mask)
    number = starts.cumsum(0)  # runs so far, over all rows
    position = torch.arange(len(flat), device=flat.device)
    first = torch.where(row_start, position, 0).cummax(0).values if len(flat) else position
    earlier = number[first] - starts[first].long()  # runs of the rows before
    return like(torch.where(flat, number - earlier - 1, -1), mask)


#: Accepted by the losses that have turns: the number of each token's turn (:func:`turn_ids`), before a rejection.
TURN = "turn"


@dataclass(frozen=True)
class Turns:
    """The turns of a batch: ``index`` is the turn of each token, (B, L) or jagged like the mask, ``n`` for no turn.

    Turns are numbered through the whole batch, row after row; ``tokens`` (n,) is the number of tokens of each.
    """

    index: Tensor
    n: int
    tokens: Tensor

    @classmethod
    def of(cls, mask: Tensor, turn: Tensor | None = None) -> Turns:
        """The turns of a response mask, (B, L) or jagged: the runs of ones.

        ``turn`` (like the mask), if given, is the turn of each token within its row, for a mask from which tokens were
        rejected. Numbers without a token are turns without tokens.
        """
        flat, row_start, starts = _runs(mask)
        if turn is None:
            number = starts.cumsum(0) - 1
        else:
            of_row = torch.where(flat, _values(turn).long(), 0)
            number = (row_start.cumsum(0) - 1) * (of_row.max() + 1 if len(flat) else 1) + of_row
        n = int(number.max()) + 1 if len(flat) else 0
        index = torch.where(flat, number, n)
        return cls(like(index, mask), n, torch.bincount(index, minlength=n + 1)[:n])

    def sum(self, values: Tensor) -> Tensor:
        """Sum of ``values`` (like the mask) over each turn -> (n,)."""
        flat = _values(values)
        return flat.new_zeros(self.n + 1).index_add(0, _values(self.index), flat)[: self.n]

    def mean(self, values: Tensor) -> Tensor:
        """Mean of ``values`` (like the mask) over each turn -> (n,)."""
        return self.sum(values) / self.tokens.clamp(min=1)

    def first(self) -> Tensor:
        """Position of each turn's first token in the flat mask -> (n,) int64; its length, for a turn without tokens."""
        index = _values(self.index)
        position = torch.arange(len(index), device=index.device)
        return position.new_full((self.n + 1,), len(index)).scatter_reduce_(0, index, position, "amin")[: self.n]

    def spread(self, per_turn: Tensor) -> Tensor:
        """Write one value per turn, (n,), onto its tokens: like the mask, zero off the turns."""
        padded = torch.cat([per_turn, per_turn.new_zeros(1)])
        return like(padded[_values(self.index)], self.index)


def row_offsets(jagged: Tensor) -> Tensor:
    """Where the rows of a jagged tensor begin in its values, and where the last one ends: (B + 1,)."""
    return jagged.offsets()  # pyright: ignore[reportAttributeAccessIssue]


def _values(tensor: Tensor) -> Tensor:
    return tensor.values() if tensor.is_nested else tensor.reshape(-1)


def _runs(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mask as one row of bool, where a row of the batch starts in it, and where a run of ones does."""
    flat = _values(mask).bool()
    row_start = torch.zeros_like(flat)
    if mask.is_nested:
        starts = row_offsets(mask)[:-1]
        row_start[starts[starts < len(flat)]] = True  # the last rows may be empty
    elif len(flat):
        row_start.view(mask.shape)[:, 0] = True
    before = torch.zeros_like(flat)
    before[1:] = flat[:-1]
    return flat, row_start, flat & (~before | row_start)


def like(flat: Tensor, shape: Tensor) -> Tensor:
    """``flat`` (tokens,) in the shape of another tensor, padded or jagged."""
    if shape.is_nested:
        offsets = row_offsets(shape)
        longest = int(offsets.diff().max())  # without it torch pads each row to the length of all rows together
        return torch.nested.nested_tensor_from_jagged(flat, offsets, max_seqlen=longest)
    return flat.view(shape.shape)
