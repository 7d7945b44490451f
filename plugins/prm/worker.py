"""The worker of a process reward model, which verl makes in the processes of its other roles."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker

from verl_turnkey.plugins.config.scorers import COEFFICIENT, HEAD_BIAS, OUT, PrmConfig
from verl_turnkey.plugins.prm import engine
from verl_turnkey.plugins.prm.rows import SHIFT


class PrmWorker(TrainingWorker):
    """verl's worker with an engine of ours and a linear loss; its model is built at once, before any other."""

    def __init__(self, config: TrainingWorkerConfig) -> None:
        kind = next(kind for kind in SHIFT if engine.model_type(kind) == config.model_type)
        engine.register(kind, config.engine_config.strategy)
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
        model_type=engine.model_type(prm.kind),
        model_config=omega_conf_to_dataclass(model),
        engine_config=built.engine,
        optimizer_config=built.optim,
        checkpoint_config=built.checkpoint,
    )
