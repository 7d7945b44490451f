"""The bridge between verl's actor update and our policy losses.

Actor workers see only ``actor_rollout_ref``, and verl's own loss config refuses unknown keys: the trainer therefore
calls :func:`use` inside every worker process once it exists (``register.py``), and the functions in verl's registry
find their parameters here.

With ``st_ppo`` and ``s_ppo`` the gradient of an optimizer step is divided by the norm of its clipping bias, which is a
gradient that a policy loss cannot return. Inside an actor worker :func:`install` replaces the engine's ``train_batch``
by :func:`train_batch`. It takes a second forward and backward pass, over the rows with clipped tokens only (and other
rows as far as the ranks need equal numbers), and none when no rank has a clipped token.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from verl.trainer.ppo import core_algos
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.workers.utils.padding import no_padding_2_padding

from verl_turnkey.losses.registry import LossSpec, TokenLoss, loss_spec, scales_gradient, token_loss
from verl_turnkey.plugins.actor import loss_inputs, updates, weighing
from verl_turnkey.plugins.verl_api import internals

ROW = "turnkey_row"


@dataclass
class ClippedRows:
    """The rows of a mini-batch with tokens clipped in the first pass: ``rows`` are positions on this rank."""

    rows: list[int] = field(default_factory=list)
    of_micro_batch: torch.Tensor | None = None

    def note(self, term: TokenLoss) -> None:
        """Called by the policy loss, once per micro-batch."""
        if self.of_micro_batch is not None and term.bias is not None:
            self.rows += self.of_micro_batch[(term.bias != 0).any(1)].tolist()


clipped_rows = ClippedRows()


def install(worker: Any, spec: LossSpec, params: Any) -> None:
    """Run inside an actor worker: its optimizer steps are scaled from now on."""
    engine = internals.actor_worker(worker).actor.engine
    verls = type(engine).train_batch.__get__(engine)
    engine.train_batch = partial(train_batch, engine, verls, spec, params)


def train_batch(
    engine: Any,
    verls: Callable[..., Any],
    spec: LossSpec,
    params: Any,
    data: TensorDict,
    loss_function: Callable[..., Any],
) -> Any:
    """One optimizer step on a mini-batch; replaces ``BaseEngine.train_batch``.

    verl's own method does everything except the scaling, which happens right before the optimizer step.
    """
    extra: dict[str, float] = {}
    data[ROW] = torch.arange(len(data))

    def first_pass(model_output: Any, data: TensorDict, dp_group: Any = None) -> Any:
        with patch.object(clipped_rows, "of_micro_batch", data[ROW]):
            return loss_function(model_output=model_output, data=data, dp_group=dp_group)

    step = engine.optimizer_step

    def scaled_step() -> Any:
        extra.update(_scale(engine, spec, params, data, loss_function.keywords["config"]))
        return step()

    clipped_rows.rows.clear()
    with patch.object(engine, "optimizer_step", scaled_step):
        outputs = verls(data, first_pass)
    if engine.is_mp_src_rank_with_outputs():
        outputs["metrics"] |= {f"actor/clipping_bias/{key}": [value] for key, value in extra.items()}
    return outputs


def _scale(engine: Any, spec: LossSpec, params: Any, data: TensorDict, config: Any) -> dict[str, float]:
    """Scale the gradients of the first pass; returns the metrics."""
    started = time.perf_counter()
    anywhere, most = (torch.tensor([len(clipped_rows.rows)], device=get_device_name()) for _ in range(2))
    dist.all_reduce(anywhere, group=engine.get_data_parallel_group())
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=engine.get_data_parallel_group())
    norm, scale = 0.0, 1.0
    if anywhere.item():
        parameters = [p for p in engine.module.parameters() if p.grad is not None]
        gradients = [p.grad for p in parameters]
        engine.optimizer_zero_grad()
        part = tu.index_select_tensor_dict(data, torch.tensor(_second_pass(data, int(most))))
        engine.forward_backward_batch(part, partial(_bias, spec, params, config))
        norm = _total_norm(engine)
        scale = params.gradient_scale(norm)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.mul_(scale)
    return {"norm": norm, "scale": scale, "rows": float(anywhere.item()), "seconds": time.perf_counter() - started}


def _second_pass(data: TensorDict, most: int) -> list[int]:
    """The rows that this rank computes again, as many as the rank with the ``most`` clipped ones.

    All ranks need the same number of micro-batches, and micro-batches of a fixed size must be full: they are filled up
    with unclipped rows, whose bias is zero. There are enough, because a mini-batch has the same number of rows on all
    ranks.
    """
    if not tu.get_non_tensor_data(data, "use_dynamic_bsz", default=True):
        most += -most % int(data["micro_batch_size_per_gpu"])
    clipped = set(clipped_rows.rows)
    unclipped = [row for row in range(len(data)) if row not in clipped]
    return sorted([*clipped, *unclipped[: most - len(clipped)]])


def _bias(
    spec: LossSpec, params: Any, config: Any, model_output: Any, data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss of the second pass: its gradient is the clipping bias, averaged as verl averages the loss.

    verl's divisor belongs to the whole mini-batch; the first pass has left it in the config.
    """
    log_prob = no_padding_2_padding(model_output["log_probs"], data)
    fields = ["response_mask", "old_log_probs", "advantages"]
    fields += ["rollout_is_weights"] if "rollout_is_weights" in data else []
    padded = data.select(*fields).to_padded_tensor()
    mask = padded["response_mask"].to(bool)
    term = token_loss(
        spec,
        params,
        log_prob=log_prob,
        old_log_prob=padded["old_log_probs"],
        advantages=padded["advantages"],
        response_mask=mask,
        extra=loss_inputs.read(data, spec.inputs),
        finite=False,
    )
    weights = padded.get("rollout_is_weights", None)
    assert term.bias is not None
    bias = term.bias if weights is None else term.bias * weights
    with weighing.applied(data):
        return core_algos.agg_loss(bias, mask, config.loss_agg_mode, **config.global_batch_info), {}


def _total_norm(engine: Any) -> float:
    """L2 norm over all parameters on all ranks."""
    gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
    # A rank may hold no shard but must take part in the reduction below, and the norm of no tensors is 0 on the CPU;
    # gradients that are offloaded are on the CPU, too. verl moves the norm that it clips by in the same way.
    norm = torch.nn.utils.get_total_norm(gradients).to(get_device_name())
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    elif isinstance(engine.module, FullyShardedDataParallel):  # FSDP1: plain tensors, each rank its own shards
        square = norm.square()
        dist.all_reduce(square, group=engine.module.process_group)
        norm = square.sqrt()
    scaler = getattr(engine, "scaler", None)
    return norm.item() / (scaler.get_scale() if scaler is not None else 1.0)


_params: dict[str, Any] = {}
_found_finite: set[str] = set()
"""losses found finite in this process; each is checked once, because the check synchronizes with the device"""


def use(worker: Any, name: str, params: Any) -> None:
    """Run inside an actor worker: the loss ``name`` is computed with ``params``, its frozen dataclass."""
    _params[name] = params
    loss_inputs.hand_over(worker, loss_spec(name).inputs)
    if scales_gradient(params):
        install(worker, loss_spec(name), params)


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
        clipped_rows.note(term)
        updates.note(term)
        per_token = term.loss if rollout_is_weights is None else term.loss * rollout_is_weights
        # Looked up at each call, because weighing.py replaces it while token weights apply.
        total = core_algos.agg_loss(per_token, response_mask, loss_agg_mode, **config.global_batch_info)
        return total, {f"actor/{key}": value for key, value in term.metrics.items()}

    loss.__qualname__ = f"verl_loss({name})"
    loss.turnkey = True
    return loss
