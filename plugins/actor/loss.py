"""The bridge between verl's actor update and our policy losses.

Actor workers see only ``actor_rollout_ref``, and verl's own loss config refuses unknown keys: the trainer therefore
calls :func:`use` inside every worker process once it exists (``registries.py``), and the functions in verl's
registry find their parameters here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from verl.trainer.ppo import core_algos

from verl_turnkey.losses.registry import loss_spec, scales_gradient, token_loss
from verl_turnkey.plugins.actor import clipping_bias, loss_inputs, updates

_params: dict[str, Any] = {}
_found_finite: set[str] = set()
"""losses found finite in this process; each is checked once, because the check synchronizes with the device"""


def use(worker: Any, name: str, params: Any) -> None:
    """Run inside an actor worker: the loss ``name`` is computed with ``params``, its frozen dataclass."""
    _params[name] = params
    loss_inputs.hand_over(worker, loss_spec(name).inputs)
    if scales_gradient(params):
        clipping_bias.install(worker, loss_spec(name), params)


def verl_loss(name: str) -> Callable[..., tuple[torch.Tensor, dict[str, Any]]]:
    """The function that verl's registry of policy losses holds under ``name``."""

    def loss(
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str,
        config: Any,
        rollout_is_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        if name not in _params:
            raise RuntimeError(
                f"policy loss {name!r} has no parameters in this process, which a turnkey trainer hands over: set "
                "trainer.v1.trainer_mode=turnkey_sync (or turnkey_colocate_async, turnkey_separate_async)"
            )
        term = token_loss(
            loss_spec(name),
            _params[name],
            log_prob=log_prob,
            old_log_prob=old_log_prob,
            advantages=advantages,
            response_mask=response_mask,
            extra=loss_inputs.current(),
            finite=name not in _found_finite,
        )
        if name not in _found_finite and response_mask.any():  # a micro-batch of padding alone proves nothing
            _found_finite.add(name)
        clipping_bias.clipped_rows.note(term)
        updates.note(term)
        per_token = term.loss if rollout_is_weights is None else term.loss * rollout_is_weights
        # Looked up at each call, because verl_api/aggregation.py replaces it while token weights apply.
        total = core_algos.agg_loss(per_token, response_mask, loss_agg_mode, **config.global_batch_info)
        return total, {f"actor/{key}": value for key, value in term.metrics.items()}

    loss.__qualname__ = f"verl_loss({name})"
    loss.turnkey = True
    return loss
