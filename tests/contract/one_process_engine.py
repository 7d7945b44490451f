"""verl's FSDP engine in one process, as far as its forward step reads it, and a micro-batch for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from contract_tools import nested
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

VOCABULARY = 97


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
