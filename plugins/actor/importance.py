"""``turnkey.update.importance``: importance weights of the rollout's policy, in verl's column ``rollout_is_weights``.

verl multiplies every policy loss by that column. The trainer writes it after verl's advantage step, in which verl
itself can give a weight to single tokens or to whole rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from verl_turnkey.advantage import ConfigError
from verl_turnkey.losses.clipping import importance_weights, units_of
from verl_turnkey.losses.turns import Turns, like
from verl_turnkey.plugins.config.training import UpdateConfig
from verl_turnkey.plugins.credit.rows import Rows

FIELDS = ("rollout_log_probs", "old_log_probs")
"""fields of the queue that the weights are computed from"""


def columns(
    options: UpdateConfig, response_mask: torch.Tensor, now: Mapping[str, torch.Tensor], table: Rows | None
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The weights as a column of the queue, and metrics; neither without ``importance``.

    ``importance_outside=clear_mask`` also writes both masks, without the units outside the bounds: the losses read
    ``response_mask``, the number of tokens that verl divides by is that of ``loss_mask``.

    Args:
        response_mask: (B, L) nested, as the agent loop wrote it: it defines the turns, and all of their tokens count.
        now: :data:`FIELDS`, and the mask as the queue has it, which a rejection may have changed.
        table: the table of steps; None: every run of ones is a turn.

    Raises:
        ConfigError: the rows have no log-probabilities of the rollout.
    """
    if options.importance is None:
        return {}, {}
    if missing := [name for name in FIELDS if name not in now]:
        raise ConfigError(
            f"turnkey.update.importance={options.importance} compares old_log_probs with rollout_log_probs, but the "
            f"rows have no {' and no '.join(missing)}: let the agent loop return response_logprobs in each output, or "
            "set turnkey.update.importance=null"
        )
    turns = Turns.of(response_mask) if table is None else table.turns
    units = units_of(options.importance, response_mask, turns)
    log_ratio = like(now["old_log_probs"].values().double() - now["rollout_log_probs"].values().double(), units.index)
    weight, inside = importance_weights(
        log_ratio,
        units,
        ratio=options.importance_ratio,
        outside=options.importance_outside,
        high=options.importance_high,
        low=options.importance_low,
    )
    written = {"rollout_is_weights": units.spread(weight.float())}
    if options.importance_outside == "clear_mask":
        mask = now["response_mask"]
        kept = like(mask.values() * units.spread(inside.to(mask.dtype)).values(), mask)
        written |= {"response_mask": kept, "loss_mask": kept}
    return written, _metrics(units, weight, inside)


def _metrics(units: Turns, weight: torch.Tensor, inside: torch.Tensor) -> dict[str, float]:
    """Of the units with a token; shares of units and of tokens outside the bounds."""
    used = units.tokens > 0
    tokens, weight, inside = units.tokens[used].double(), weight[used], inside[used]
    if not len(weight):
        return {}
    return {
        "importance/weight/mean": weight.mean().item(),
        "importance/weight/min": weight.min().item(),
        "importance/weight/max": weight.max().item(),
        "importance/outside": 1 - inside.double().mean().item(),
        "importance/outside_tokens": (tokens[~inside].sum() / tokens.sum()).item(),
        # Kish: the number of equally weighted units with the variance of these, as a share of their number.
        "importance/effective": (weight.sum().square() / (len(weight) * weight.square().sum()).clamp(min=1e-30)).item(),
    }
