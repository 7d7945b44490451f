"""verl's FSDP engine with logits only where they are used.

In conversations most tokens are the environment's: of 8,000 tokens a step perhaps 1,000 are the policy's own. verl
computes logits for all of them, and with a vocabulary of 50,000 and a small model that is most of a step. Here the
output layer sees the positions whose next token is in the loss mask. Log-probabilities, entropies and gradients there
are verl's own; elsewhere they are 0, where no loss, metric or ratio reads them.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import verl.utils.torch_functional as verl_functional
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_turnkey.losses.turns import like, row_offsets
from verl_turnkey.plugins.credit.metrics import LEARNED


def free_memory() -> None:
    """Give freed memory back to the system: glibc keeps the holes between what lives on, several GB after a batch."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


class FreesMemory:
    """Of an engine: no more memory between two batches than what lives on, which vLLM and other roles then have."""

    def forward_backward_batch(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().forward_backward_batch(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            free_memory()


class ValueEngine(FreesMemory, FSDPEngineWithValueHead):
    """The critic's."""


# What computes or needs logits in another way than the plain padded batch does.
OTHER_PATHS = {"use_remove_padding": True, "use_fused_kernels": False, "distillation_use_topk": False}


class SparseLogitsEngine(FreesMemory, FSDPEngineWithLMHead):
    """``FSDPEngineWithLMHead`` for padded batches; any other batch goes the parent's way."""

    _positions: torch.Tensor | None = None
    """of the present micro-batch, in the flattened (rows, longest) grid; None: all"""
    _hooked = False

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self._hooked:
            self.module.get_output_embeddings().register_forward_pre_hook(self._select)  # pyright: ignore[reportAttributeAccessIssue]
            self._hooked = True
        settings = (
            tensordict_utils.get_non_tensor_data(micro_batch, key=key, default=default)
            for key, default in OTHER_PATHS.items()
        )
        self._positions = None if any(settings) else used_positions(micro_batch)
        return super().prepare_model_inputs(micro_batch)  # pyright: ignore[reportAttributeAccessIssue]

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Any]:
        if self._positions is None:
            verls = super().prepare_model_outputs  # pyright: ignore[reportAttributeAccessIssue]
            return verls(output, output_args, micro_batch, logits_processor_func)
        offsets = row_offsets(micro_batch["input_ids"])
        width = int(offsets.diff().max())
        row, column = self._positions // width, self._positions % width
        packed = offsets[row] + column  # the same positions without padding
        logits = output.logits[0] / output_args["temperature"][row, None]

        def spread(values: torch.Tensor) -> torch.Tensor:
            everywhere = values.new_zeros(int(offsets[-1])).index_put((packed,), values)
            return torch.nested.nested_tensor_from_jagged(everywhere, offsets)

        labels = output_args["input_ids_rmpad_rolled"][packed]
        outputs = {"log_probs": spread(logprobs_from_logits(logits=logits, labels=labels))}
        if tensordict_utils.get_non_tensor_data(micro_batch, key="calculate_entropy", default=False):
            outputs["entropy"] = spread(verl_functional.entropy_from_logits(logits))
        if tensordict_utils.get_non_tensor_data(micro_batch, key="calculate_sum_pi_squared", default=False):
            outputs["sum_pi_squared"] = spread(verl_functional.calculate_sum_pi_squared_from_logits(logits))
        return outputs

    def _select(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...] | None:
        """Before the output layer: (rows, longest, width) becomes (1, positions, width)."""
        if self._positions is None:
            return None
        hidden, *others = inputs
        return (hidden.flatten(0, 1)[None, self._positions], *others)


def used_positions(micro_batch: TensorDict) -> torch.Tensor | None:
    """Where the next token is in the loss mask, as indices into the flattened (rows, longest) grid; ascending.

    ``loss_mask`` covers the responses, at the end of each row of ``input_ids``, or in supervised training whole rows;
    tokens of observations that are learned count as well. Without any token one position stands for all, so that
    gradients, zeros, exist. None when the mask has a row's first token, which no position predicts.
    """
    lengths, mask = row_offsets(micro_batch["input_ids"]).diff(), micro_batch["loss_mask"]
    if LEARNED in micro_batch:
        mask = like((mask.values() > 0) | (micro_batch[LEARNED].values() > 0), mask)
    if not mask.is_nested:
        return None
    covered = row_offsets(mask).diff()
    if any(bool(part[0]) for part, whole in zip(mask.unbind(), (covered >= lengths).tolist(), strict=True) if whole):
        return None
    width = int(lengths.max())
    starts = torch.arange(len(lengths), device=lengths.device) * width + lengths - covered - 1
    positions = [start + part.nonzero()[:, 0] for start, part in zip(starts, mask.unbind(), strict=True)]
    chosen = torch.cat(positions)
    return chosen if len(chosen) else starts[:1].clamp(min=0)
