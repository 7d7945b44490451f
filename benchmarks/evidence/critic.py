"""A critic for the plain loop: the policy's body with a head of one number."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from minimal_loop import Row, hidden_states, micro_batches
from torch import Tensor, nn
from transformers import AutoModel


class Critic(nn.Module):
    """Values before each token of a response; starts from the policy's weights with a random head."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.body: Any = AutoModel.from_pretrained(model)
        self.head = nn.Linear(self.body.config.hidden_size, 1)
        nn.init.normal_(self.head.weight, std=self.body.config.initializer_range)
        nn.init.zeros_(self.head.bias)

    def forward(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Values, (B, longest response), 0 outside of the mask; and the mask."""
        hidden, mask, _ = hidden_states(self.body, rows)
        return self.head(hidden)[..., 0] * mask, mask

    @torch.no_grad()
    def values(self, rows: Sequence[Row]) -> dict[Row, list[float]]:
        """The values of each row; equal rows are computed once."""
        unique = list(dict.fromkeys(rows))
        values: dict[Row, list[float]] = {}
        for batch in micro_batches(unique):
            batch_values, _ = self([unique[i] for i in batch])
            values |= {unique[i]: row[: len(unique[i][1])] for i, row in zip(batch, batch_values.tolist(), strict=True)}
        return values
