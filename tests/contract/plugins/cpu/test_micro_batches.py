"""Micro-batches of rows of like length: nothing but the order and the padding changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.utils.seqlen_balancing import restore_dynamic_batch
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.utils import prepare_micro_batches as verls

from verl_turnkey.plugins.cpu.patches import by_length, sort_by_length

LENGTHS = [3, 9, 4, 8, 3, 9, 1]


def batch(lengths: list[int] = LENGTHS, **settings: Any) -> TensorDict:
    rows = [torch.full((length,), row) for row, length in enumerate(lengths)]
    data = TensorDict({"input_ids": torch.nested.nested_tensor(rows, layout=torch.jagged)}, batch_size=len(lengths))
    defaults = {"max_token_len_per_gpu": 18, "use_remove_padding": False, "sp_size": 1, "use_dynamic_bsz": True}
    tensordict_utils.assign_non_tensor(data, **{**defaults, **settings})
    return data


def rows_of(parts: list[TensorDict]) -> list[list[int]]:
    return [[int(row[0]) for row in part["input_ids"].unbind()] for part in parts]


def padded(parts: list[list[int]], lengths: list[int]) -> int:
    return sum(len(part) * max(lengths[row] for row in part) for part in parts)


def test_rows_of_like_length_are_together() -> None:
    parts, indices = sort_by_length(verls)(batch())
    assert rows_of(parts) == indices == [[1, 5], [3, 2], [0, 4, 6]]
    outputs = torch.nested.as_nested_tensor(
        [row for part in parts for row in part["input_ids"].unbind()], layout=torch.jagged
    )
    assert [int(row[0]) for row in restore_dynamic_batch(outputs, indices).unbind()] == list(range(len(LENGTHS)))


def test_every_row_once_within_the_limit_and_less_padding_than_verl() -> None:
    rng = random.Random(0)
    ours_total, theirs_total = 0, 0
    for _ in range(20):
        lengths = [rng.randint(100, 560) for _ in range(32)]
        parts = by_length(lengths, 2048)
        assert sorted(row for part in parts for row in part) == list(range(32))
        assert all(len(part) * max(lengths[row] for row in part) <= 2048 for part in parts)
        _, theirs = verls(batch(lengths, max_token_len_per_gpu=2048))
        ours_total += padded(parts, lengths)
        theirs_total += padded(theirs, lengths)
    assert ours_total < 0.85 * theirs_total


@pytest.mark.parametrize(
    "settings",
    [
        {"use_remove_padding": True},
        {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 7},
        {"force_group_size": 7, "max_token_len_per_gpu": 37},
    ],
)
def test_what_leaves_no_choice_is_verls(settings: dict[str, Any]) -> None:
    data = batch(**settings)
    ours, theirs = sort_by_length(verls)(data), verls(data)
    assert rows_of(ours[0]) == rows_of(theirs[0])
    assert ours[1] == theirs[1]


def test_a_row_above_the_limit_is_refused_by_verl() -> None:
    with pytest.raises(AssertionError, match="max_token_len must be greater than the sequence length"):
        sort_by_length(verls)(batch(max_token_len_per_gpu=8))


def test_verls_engine_uses_it() -> None:
    assert transformer_impl.prepare_micro_batches.__module__ == "verl_turnkey.plugins.cpu.patches"
