"""verl's ``agg_loss``, which turns one number per token into a loss: replaced while a loss runs.

verl's losses take it from the modules in ``BINDINGS``: the policy losses and the value loss from the first, entropy and
KL from the second. Our own losses call it as ``core_algos.agg_loss``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

BINDINGS = ("verl.trainer.ppo.core_algos", "verl.workers.utils.losses")


@contextmanager
def weighed(weight: torch.Tensor, mini_batches: int) -> Iterator[None]:
    """Inside this context ``agg_loss`` returns the weighted sum over tokens, whatever its ``loss_agg_mode``.

    Args:
        weight: (B, L), the micro-batch's part of weights that sum to 1 over the whole batch.
        mini_batches: number of mini-batches of the batch. The weights of one sum to about 1 / ``mini_batches``, so its
            loss is multiplied by this number.
    """
    modules: list[Any] = [importlib.import_module(name) for name in BINDINGS]
    originals = [module.agg_loss for module in modules]

    def agg_loss(
        loss_mat: torch.Tensor, loss_mask: torch.Tensor, loss_agg_mode: str, dp_size: int = 1, **_: Any
    ) -> torch.Tensor:
        # verl multiplies token-sum by dp_size, because gradients are averaged over the ranks.
        scaled = loss_mat * (weight * mini_batches)
        return originals[0](loss_mat=scaled, loss_mask=loss_mask, loss_agg_mode="token-sum", dp_size=dp_size)

    for module in modules:
        module.agg_loss = agg_loss
    try:
        yield
    finally:
        for module, original in zip(modules, originals, strict=True):
            module.agg_loss = original
