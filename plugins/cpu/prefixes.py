"""Rows that begin alike, computed once: a micro-batch as a tree of its tokens.

The rollouts of a group begin with the same prompt, and the rows of an episode with the same turns. In a causal model
the state of a token depends only on the tokens before it, so rows with the same first tokens have the same states
there. The model therefore gets each distinct prefix once, in one sequence of N nodes: each with its position in its
row, and a mask of its ancestors. States, log-probabilities and gradients equal those of padded rows, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from verl_turnkey.losses.turns import row_offsets

MODEL_TYPES = {"llama", "qwen2", "qwen3"}
"""decoders that use a four-dimensional mask unchanged, and mix tokens only in attention"""
ATTENDED, STARTED = 5, 32
"""A layer's matrices cost as much per token as attention to this many times the hidden size in tokens; gathering the
weights for a micro-batch costs as much as this many of its tokens."""


def takes_trees(config: Any) -> bool:
    """Whether a model with this configuration of transformers computes a tree as it computes rows."""
    return (
        config.model_type in MODEL_TYPES
        and config._attn_implementation in ("sdpa", "eager")
        and {*(getattr(config, "layer_types", None) or ())} <= {"full_attention"}
        and not getattr(config, "attention_dropout", 0.0)
    )


def in_order(rows: Sequence[list[int]]) -> tuple[list[int], list[int]]:
    """An order with rows of a common prefix side by side; how many first tokens each shares with the one before."""
    order = sorted(range(len(rows)), key=lambda row: rows[row])
    return order, [0, *(_common(rows[before], rows[row]) for before, row in pairwise(order))]


def _common(earlier: list[int], later: list[int]) -> int:
    differs = (i for i, (a, b) in enumerate(zip(earlier, later, strict=False)) if a != b)
    return next(differs, min(len(earlier), len(later)))


def by_prefix(
    rows: Sequence[list[int]], used: Sequence[int], limit: int, hidden_size: int
) -> tuple[list[list[int]], int]:
    """Parts of at most ``limit`` nodes, and ``used`` positions, or of one row, in the cheapest of five sizes; the cost.

    Large trees share more, but each of their nodes is compared with all others.
    """
    order, shared = in_order(rows)
    added = [len(rows[row]) - first for row, first in zip(order, shared, strict=True)]
    cuts = [_cut(rows, used, order, added, limit >> halvings) for halvings in range(5)]
    costs = [cost([(1, size) for size in nodes], hidden_size) for _, nodes in cuts]
    return cuts[costs.index(min(costs))][0], min(costs)


def _cut(
    rows: Sequence[list[int]], used: Sequence[int], order: list[int], added: list[int], limit: int
) -> tuple[list[list[int]], list[int]]:
    """Parts of rows, and the nodes of each; ``added``: nodes of each row in ``order`` that no earlier row has."""
    parts: list[list[int]] = []
    nodes: list[int] = []
    positions = 0
    for row, new in zip(order, added, strict=True):
        if not parts or nodes[-1] + new > limit or positions + used[row] > limit:
            parts, nodes, positions, new = [*parts, []], [*nodes, 0], 0, len(rows[row])
        parts[-1].append(row)
        nodes[-1] += new
        positions += used[row]
    return parts, nodes


def cost(shapes: Sequence[tuple[int, int]], hidden_size: int) -> int:
    """What micro-batches of (rows, longest) cost, in products of two numbers; a tree of N nodes is (1, N)."""
    linear = ATTENDED * hidden_size
    return sum(rows * longest * (linear + longest) + STARTED * linear for rows, longest in shapes)


def has_plain_positions(input_ids: torch.Tensor, position_ids: torch.Tensor) -> bool:
    """Whether the positions of each row count from 0, as those of text without padding do."""
    if position_ids.dim() != 2 or not position_ids.is_nested:
        return False
    offsets = row_offsets(input_ids)
    counted = torch.arange(int(offsets[-1])) - offsets[:-1].repeat_interleave(offsets.diff())
    return torch.equal(position_ids.values(), counted)


class Tree(NamedTuple):
    """The distinct beginnings of rows, each with its last token."""

    node: torch.Tensor
    """(rows, longest) int64: the node of each token; 0 of padding"""
    ids: torch.Tensor
    """(N,) int64"""
    depth: torch.Tensor
    """(N,) int64: position of the token in its rows"""
    mask: torch.Tensor
    """(N, N) bool: the second node is the first or an ancestor of it"""

    @classmethod
    def of(cls, input_ids: torch.Tensor) -> Tree:
        """Of nested rows."""
        rows = [row.tolist() for row in input_ids.unbind()]
        order, shared = in_order(rows)
        size = sum(map(len, rows)) - sum(shared)
        node = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        ids, depth = torch.zeros(2, size, dtype=torch.int64)
        mask = torch.zeros(size, size, dtype=torch.bool)
        first, before = 0, order[0]
        for row, start in zip(order, shared, strict=True):
            length = len(rows[row])
            new = slice(first, first + length - start)
            ids[new], depth[new] = input_ids[row][start:], torch.arange(start, length)
            node[row, :start] = node[before, :start]
            node[row, start:length] = torch.arange(new.start, new.stop)
            # A new node sees the nodes of its row up to itself.
            mask[new, node[row, :length]] = torch.ones(length - start, length, dtype=torch.bool).tril(start)
            first, before = new.stop, row
        return cls(node, ids, depth, mask)

    def inputs(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Of the model, as one row; ``dtype``: in which it computes."""
        # Floats: sdpa would convert a bool mask in each layer, and keep every copy until the backward pass.
        mask = torch.zeros(self.mask.shape, dtype=dtype).masked_fill_(~self.mask, torch.finfo(dtype).min)
        return {"input_ids": self.ids[None], "position_ids": self.depth[None], "attention_mask": mask[None, None]}
