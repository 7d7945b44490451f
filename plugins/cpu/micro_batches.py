"""Micro-batches of rows of like length.

Without kernels for packed sequences every row of a micro-batch is padded to the longest. verl balances micro-batches by
mixing lengths, which suits packed rows and makes the most of padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensordict import TensorDict

Prepared = tuple[list["TensorDict"], list[list[int]] | None]


def by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Partition rows, longest first, so that each part has at most ``max_tokens`` with padding, or is one row.

    Args:
        lengths: tokens of each row, 1 or more.
        max_tokens: of a micro-batch, padding included.

    Returns:
        The rows of each micro-batch: as few as rows in this order allow.
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    parts = []
    while order:
        size = max(1, max_tokens // lengths[order[0]])
        parts.append(order[:size])
        order = order[size:]
    return parts


def sort_by_length(prepare: Callable[..., Prepared]) -> Callable[..., Prepared]:
    """verl's ``prepare_micro_batches``, with rows of like length together where one process trains alone.

    Several ranks must agree on the number of micro-batches, rows of a forced group must stay together, and a fixed
    number of rows leaves no choice: there verl's own partition stands.
    """
    import torch.distributed as dist
    from verl.utils import tensordict_utils

    from verl_turnkey.losses.turns import row_offsets

    def prepare_micro_batches(data: TensorDict, dp_group: Any = None, **options: Any) -> Prepared:
        def setting(key: str, default: Any) -> Any:
            return tensordict_utils.get_non_tensor_data(data=data, key=key, default=default)

        alone = dp_group is None or dist.get_world_size(dp_group) == 1
        free = setting("use_dynamic_bsz", True) and setting("force_group_size", 1) == 1
        if not alone or not free or setting("use_remove_padding", True) or not data["input_ids"].is_nested:
            return prepare(data, dp_group=dp_group, **options)
        lengths = row_offsets(data["input_ids"]).diff().tolist()
        limit = data["max_token_len_per_gpu"] * setting("sp_size", 1)
        if max(lengths) > limit:  # verl says so
            return prepare(data, dp_group=dp_group, **options)
        parts = by_length(lengths, limit)
        return [tensordict_utils.index_select_tensor_dict(data, part) for part in parts], parts

    return prepare_micro_batches
