"""The worker of a process reward model, which verl makes in the processes of its other roles, and its engine."""

from __future__ import annotations

import os
from copy import deepcopy
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import torch
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from torch.nn import Linear
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine_workers import TrainingWorker

from verl_turnkey.losses.turns import Turns, like, row_offsets
from verl_turnkey.plugins.config.scorers import COEFFICIENT, HEAD_BIAS, OUT, PrmConfig

#: Of each kind: positions between a response token and the output that is its. A token's log-probability is an output
#: of the position before it; a head is read at the token itself.
SHIFT = {"implicit": 1, "head": 0}


def of_response(output: torch.Tensor, response: torch.Tensor, shift: int) -> torch.Tensor:
    """The ``output`` (B, prompt + response) of the tokens of a ``response`` (B, L), both jagged: jagged (B, L)."""
    ends, lengths = row_offsets(output)[1:] - shift, row_offsets(response).diff()
    values = output.values()
    rows = [values[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
    return like(torch.cat(rows), response)


def own_tokens(turns: Turns, kind: str) -> torch.Tensor:
    """Which tokens a turn's number is the sum over: all of the turn, or of a head the last. Jagged bool."""
    index = turns.index.values()
    of_turn = index < turns.n
    if kind == "implicit":
        return like(of_turn, turns.index)
    position = torch.arange(len(index))
    last = position.new_full((turns.n + 1,), -1).scatter_reduce_(0, index, position, "amax")
    return like(of_turn & (last[index] == position), turns.index)


# verl's engines with the output of a process reward model under a name of its own.
#
# ``log_probs`` and ``values`` are columns of the actor and the critic in verl's queue, to which a worker's outputs go.

#: Of each kind: verl's type of the model, and its output.
VERLS = {"implicit": ("language_model", "log_probs"), "head": ("value_model", "values")}


def model_type(kind: str) -> str:
    """The name of a kind's engine in verl's registry."""
    return f"turnkey_{kind}"


@cache
def register(kind: str, strategy: str) -> None:
    """Put the engine of a kind for ``strategy`` (fsdp, fsdp2) into verl's registry, for the device of this process."""
    verls_type, output_name = VERLS[kind]

    class Engine(EngineRegistry.get_engine_cls(verls_type, strategy)):
        def _build_module(self) -> Any:
            self.model_config.model_type = verls_type  # which decides on the class of the module
            module = super()._build_module()
            if not getattr(self.model_config.hf_config, HEAD_BIAS, True):
                heads = [layer for layer in module.modules() if isinstance(layer, Linear) and layer.out_features == 1]
                heads[-1].register_parameter("bias", None)
            return module

        def prepare_model_outputs(
            self, output: Any, output_args: dict[str, Any], micro_batch: Any, logits_processor_func: Any
        ) -> dict[str, Any]:
            verls = super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
            return {OUT: verls[output_name]}

    EngineRegistry.register(model_type=model_type(kind), backend=strategy, device=device_of_engines())(Engine)


def device_of_engines() -> str:
    """The device for which verl looks up an engine in this process."""
    return os.getenv("VERL_ENGINE_DEVICE") or get_device_name()


class PrmWorker(TrainingWorker):
    """verl's worker with an engine of ours and a linear loss; its model is built at once, before any other."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        kind = next(kind for kind in SHIFT if model_type(kind) == config.model_type)
        register(kind, config.engine_config.strategy)
        super().__init__(config)
        self.reset()
        self.set_loss_fn(partial(linear_loss, shift=SHIFT[kind]))


def linear_loss(
    model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None, *, shift: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The sum of coefficient times output over the tokens of a micro-batch: its gradient is that of the objective.

    The optimizer sees the mean over ranks, hence ``dp_size``.
    """
    output: Any = model_output[OUT]  # jagged
    values, ends = output.values(), output.offsets()[1:].tolist()
    total = values.sum() * 0.0
    for coefficients, end in zip(data[COEFFICIENT].unbind(), ends, strict=True):
        total = total + (coefficients * values[end - shift - len(coefficients) : end - shift]).sum()
    return total * data["dp_size"], {}


def worker_config(config: DictConfig, prm: PrmConfig, *, offload: bool) -> TrainingWorkerConfig:
    """The actor's model, engine and optimizer with the settings of ``turnkey.prm``."""
    assert prm.kind is not None
    actor, model = deepcopy(config.actor_rollout_ref.actor), deepcopy(config.actor_rollout_ref.model)
    tokens = prm.max_token_len_per_gpu or actor.ppo_max_token_len_per_gpu
    with open_dict(actor), open_dict(model):
        actor.fsdp_config.update(
            param_offload=offload,
            optimizer_offload=offload,
            model_dtype=prm.model_dtype,
            forward_only=not prm.every,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=tokens,
            infer_max_token_len_per_gpu=tokens,
        )
        actor.optim.update(asdict(prm.optim), lr_warmup_steps_ratio=0.0, lr_scheduler_type="constant")
        model.lora_rank, model.lora_adapter_path = prm.lora_rank, None
        model.lora_alpha = prm.lora_alpha or 2 * prm.lora_rank
        if prm.path is not None:
            model.path, model.hf_config_path, model.tokenizer_path = prm.path, None, None
        if not prm.head_bias:
            overrides = model.override_config
            overrides.get("model_config", overrides)[HEAD_BIAS] = False
    built: Any = omega_conf_to_dataclass(actor)
    return TrainingWorkerConfig(
        model_type=model_type(prm.kind),
        model_config=omega_conf_to_dataclass(model),
        engine_config=built.engine,
        optimizer_config=built.optim,
        checkpoint_config=built.checkpoint,
    )
