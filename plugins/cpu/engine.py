"""verl's FSDP engine with logits only where they are used.

In conversations most tokens are the environment's: of 8,000 tokens a step perhaps 1,000 are the policy's own. verl
computes logits for all of them, and with a vocabulary of 50,000 and a small model that is most of a step. Here the
output layer sees the positions whose next token is in the loss mask. Log-probabilities, entropies and gradients there
are verl's own; elsewhere they are 0, where no loss, metric or ratio reads them. Rows that begin alike are computed once
where that is cheaper (:mod:`.prefixes`).
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch
import verl.utils.torch_functional as verl_functional
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from verl_turnkey.losses.turns import like, row_offsets
from verl_turnkey.plugins.cpu import prefixes
from verl_turnkey.plugins.credit.metrics import LEARNED
from verl_turnkey.plugins.credit.trainer_columns import STRIDE


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

SHARED_PREFIXES = "TURNKEY_SHARED_PREFIXES"
"""environment variable: "0" computes every row from its first token"""
HIDDEN_SIZE, IS_TREE = "turnkey_hidden_size", "turnkey_is_tree"
"""keys of a batch whose micro-batches may be trees, and of a micro-batch that is one"""


class SparseLogitsEngine(FreesMemory, FSDPEngineWithLMHead):
    """``FSDPEngineWithLMHead`` for padded batches; any other batch goes the parent's way."""

    _positions: torch.Tensor | None = None
    """of the present micro-batch, in the flattened (rows, longest) grid; None: all"""
    _states: torch.Tensor | None = None
    """the same, in what the model computes: the grid, or the nodes of a tree"""
    _hooked = False

    def forward_backward_batch(self, data: TensorDict, *args: Any, **kwargs: Any) -> Any:
        tensordict_utils.assign_non_tensor(data, **{HIDDEN_SIZE: self._shared(data), IS_TREE: False})
        return super().forward_backward_batch(data, *args, **kwargs)

    def _shared(self, data: TensorDict) -> int:
        """The model's hidden size if its micro-batches may be trees of tokens (see :func:`tree_parts`), else 0."""
        config = self.module.config  # pyright: ignore[reportAttributeAccessIssue]
        if os.environ.get(SHARED_PREFIXES, "1") != "1" or STRIDE in data or other_path(data):
            return 0
        if not prefixes.takes_trees(config) or used_positions(data) is None:
            return 0
        return config.hidden_size if prefixes.has_plain_positions(data["input_ids"], data["position_ids"]) else 0

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        if not self._hooked:
            self.module.get_output_embeddings().register_forward_pre_hook(self._select)  # pyright: ignore[reportAttributeAccessIssue]
            self._hooked = True
        self._positions = self._states = None if other_path(micro_batch) else used_positions(micro_batch)
        inputs, output_args = super().prepare_model_inputs(micro_batch)  # pyright: ignore[reportAttributeAccessIssue]
        if len(micro_batch) > 1 and tensordict_utils.get_non_tensor_data(micro_batch, key=IS_TREE, default=False):
            tree = prefixes.Tree.of(micro_batch["input_ids"])
            self._states = tree.node.flatten()[self._positions]
            inputs |= tree.inputs(getattr(self, "_autocast_dtype", torch.bfloat16))
        return inputs, output_args

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
        """Before the output layer: (rows, longest, width), or (1, nodes, width), becomes (1, positions, width)."""
        if self._states is None:
            return None
        hidden, *others = inputs
        return (hidden.flatten(0, 1)[None, self._states], *others)


def other_path(data: TensorDict) -> bool:
    """Whether :data:`OTHER_PATHS` has a setting of ``data``."""
    return any(tensordict_utils.get_non_tensor_data(data, key, default) for key, default in OTHER_PATHS.items())


def tree_parts(data: TensorDict, padded: list[list[int]], limit: int) -> list[list[int]] | None:
    """The rows of micro-batches that are trees of at most ``limit`` nodes; None where ``padded`` ones cost less."""
    hidden_size = tensordict_utils.get_non_tensor_data(data, key=HIDDEN_SIZE, default=0)
    if not hidden_size or (positions := used_positions(data)) is None:
        return None
    rows = [row.tolist() for row in data["input_ids"].unbind()]
    used = (positions // max(map(len, rows))).bincount(minlength=len(rows)).tolist()
    trees, cost = prefixes.by_prefix(rows, used, limit, hidden_size)
    shapes = [(len(part), max(len(rows[row]) for row in part)) for part in padded]
    return trees if cost < prefixes.cost(shapes, hidden_size) else None


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
