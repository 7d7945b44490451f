"""Importance weights of the trained policy over the one that sampled: per token, turn or row, truncated or masked."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from verl_turnkey.losses.clipping import clamp_log_ratio
from verl_turnkey.losses.turns import Turns, like, row_offsets

Level = Literal["token", "turn", "sequence"]
Outside = Literal["truncate", "zero_weight", "clear_mask"]


def units_of(level: Level, mask: Tensor, turns: Turns) -> Turns:
    """The tokens that share a weight: single tokens, the ``turns``, or all tokens of a row.

    Args:
        mask: (B, L) or jagged, before any rejection; tokens outside it are in no unit.
        turns: of that mask.
    """
    if level == "turn":
        return turns
    flat = (mask.values() if mask.is_nested else mask.reshape(-1)).bool()
    if level == "token":
        number, n = flat.cumsum(0) - 1, int(flat.sum())
    elif mask.is_nested:
        number, n = torch.repeat_interleave(row_offsets(mask).diff(), output_size=len(flat)), len(mask)
    else:
        number, n = torch.arange(len(mask), device=mask.device).repeat_interleave(mask.shape[1]), len(mask)
    index = torch.where(flat, number, n)
    return Turns(like(index, mask), n, torch.bincount(index, minlength=n + 1)[:n])


def importance_weights(
    log_ratio: Tensor,
    units: Turns,
    *,
    ratio: Literal["product", "geometric"] = "product",
    outside: Outside = "truncate",
    high: float = 2.0,
    low: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The weight of each unit k, (n,) float64, and whether it lies within the bounds, (n,) bool.

    ::

        r_t = log pi_old(token t) - log pi_rollout(token t)
        w_k = exp( sum  over unit k of r_t )        ratio="product"
        w_k = exp( mean over unit k of r_t )        ratio="geometric"

        min(w_k, high)                              outside="truncate"                    (TIS)
        w_k if low <= w_k <= high else 0            outside="zero_weight", "clear_mask"   (MIS)

    The sum is clamped to +-20, as in verl. Units without a token have weight 1.

    Source: per token and per row this is verl 0.9.1 (``rollout_corr_helper.py``: ``rollout_is=token`` and ``sequence``,
    with "low_high" as threshold for MIS). One weight per turn of a row with several turns is ours; on rows of one turn
    it is verl's ``sequence``.

    Args:
        log_ratio: r_t, (B, L) or jagged; only the tokens of units count.
        units: the tokens that share a weight (:func:`units_of`).
        low: lower bound; None: none. Truncation has none.
    """
    of_unit = units.sum(log_ratio.double()) if ratio == "product" else units.mean(log_ratio.double())
    weight = clamp_log_ratio(of_unit).exp()
    inside = (weight <= high) & (weight >= (low or 0.0))
    if outside == "truncate":
        return weight.clamp(max=high), inside
    return torch.where(inside, weight, 0.0), inside
