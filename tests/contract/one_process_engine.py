"""verl's FSDP engine in one process, as far as its forward step reads it, and a micro-batch for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from contract_tools import nested
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import response_from_nested

VOCABULARY = 97
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}


def micro_batch(rows: list[tuple[int, list[int]]], temperature: torch.Tensor, **settings: Any) -> TensorDict:
    """Random ids; of each row the number of tokens of its prompt, and the mask of its response."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(VOCABULARY, (prompt + len(mask),), generator=generator).tolist() for prompt, mask in rows]
    mask = nested([mask for _, mask in rows])
    columns = {
        "input_ids": nested(ids),
        "position_ids": nested([list(range(len(row))) for row in ids]),
        "loss_mask": mask,
        "response_mask": mask,
        "temperature": temperature,
    }
    batch = TensorDict(columns, batch_size=len(rows))
    tu.assign_non_tensor(batch, **{"use_remove_padding": False, "calculate_entropy": True, **settings})
    return batch


def engine(kind: type[FSDPEngineWithLMHead], model: torch.nn.Module) -> FSDPEngineWithLMHead:
    made = kind.__new__(kind)
    made.module, made.pad_to_length, made._autocast_dtype = model, None, torch.float32
    made.engine_config = SimpleNamespace(entropy_checkpointing=False)
    made.get_data_parallel_group = lambda: None
    return made


def step(kind: type[FSDPEngineWithLMHead], model: torch.nn.Module, batch: TensorDict) -> tuple[Any, list[torch.Tensor]]:
    """Model outputs and gradients of a loss that uses all of them."""

    def loss(model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: None) -> tuple[torch.Tensor, dict]:
        mask = data["response_mask"].to_padded_tensor(0)
        total = sum(
            factor * (response_from_nested(value, data["response_mask"]).to_padded_tensor(0) * mask).sum()
            for factor, value in zip((1.0, 0.3, 0.1), model_output.values(), strict=True)
        )
        return total, {}

    model.zero_grad()
    total, output = engine(kind, model).forward_step(batch, loss, forward_only=False)
    total.backward()
    return output["model_output"], [parameter.grad.clone() for parameter in model.parameters()]
