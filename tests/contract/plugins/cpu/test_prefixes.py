"""Micro-batches as trees of tokens: the outputs and gradients of verl's padded rows, on real models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import one_process_engine
import pytest
import torch
import torch.distributed as dist
from contract_tools import nested
from one_process_engine import SHAPE, engine, step
from tensordict import TensorDict
from transformers import (
    Gemma2Config,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.engine.utils import prepare_micro_batches

from verl_turnkey.plugins.cpu.engine import IS_TREE, SHARED_PREFIXES, SparseLogitsEngine
from verl_turnkey.plugins.cpu.patches import sort_by_length
from verl_turnkey.plugins.cpu.prefixes import Tree, by_prefix, cost, in_order, takes_trees
from verl_turnkey.plugins.credit.trainer_columns import STRIDE

MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
}
PROMPT = [5, 17, 3, 88, 9, 40, 22, 7, 61, 12, 33, 54, 2, 71, 80, 19]
# Of each row the tokens after the prompt, and the loss mask of its response, with observations.
ROWS = [
    ([1, 2, 3, 4, 5, 6], [1, 1, 0, 0, 1, 1]),
    ([1, 2, 3, 4], [1, 1, 0, 0]),  # the beginning of the first row
    ([1, 2, 3, 9, 9, 9, 8], [1, 1, 0, 0, 0, 1, 1]),
    ([1, 2, 3, 9, 9, 9, 8], [0] * 7),  # failed, and equal to the row before
    ([1, 2, 3, 4, 5, 6], [1, 0, 0, 1, 1, 1]),  # equal to the first row, with another mask
    ([44, 45], [1, 1]),
]


def model(name: str = "llama", attention: str = "sdpa") -> torch.nn.Module:
    kind, config = MODELS[name]
    torch.manual_seed(0)
    return kind(config(**SHAPE, tie_word_embeddings=True, attn_implementation=attention))


def micro_batch(rows: list[tuple[list[int], list[int]]] = ROWS, **settings: Any) -> TensorDict:
    """Rows after :data:`PROMPT`, and one with a prompt of its own."""
    shapes = [*((len(PROMPT), mask) for _, mask in rows), (3, [1, 0, 1])]
    temperature = torch.linspace(0.7, 1.3, len(shapes))
    batch = one_process_engine.micro_batch(shapes, temperature, calculate_sum_pi_squared=True, **settings)
    batch["input_ids"] = nested([*(PROMPT + after for after, _ in rows), [5, 17, 50, 60, 70, 80]])
    return batch


def used(batch: TensorDict) -> torch.Tensor:
    """(tokens,) 1 where the next token is in the loss mask, else 0."""
    masks, ids = batch["loss_mask"].unbind(), batch["input_ids"].unbind()
    return torch.cat([
        torch.nn.functional.pad(mask, (len(row) - len(mask) - 1, 1))
        for mask, row in zip(masks, ids, strict=True)
    ])  # fmt: skip


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_verl(name: str, attention: str) -> None:
    net, batch, sizes = model(name, attention), micro_batch(), []
    net.register_forward_pre_hook(lambda _, args, named: sizes.append(named["input_ids"].numel()), with_kwargs=True)
    verls, verls_gradients = step(FSDPEngineWithLMHead, net, batch)
    tu.assign_non_tensor(batch, **{IS_TREE: True})
    ours, gradients = step(SparseLogitsEngine, net, batch)
    assert sizes == [7 * 23, 16 + 6 + 4 + 2 + 4]
    assert list(ours) == ["log_probs", "entropy", "sum_pi_squared"] == list(verls)
    for key, value in ours.items():
        torch.testing.assert_close(value.values(), verls[key].values() * used(batch))
    for got, expected in zip(gradients, verls_gradients, strict=True):
        torch.testing.assert_close(got, expected)
        assert expected.any()


def test_a_tree_has_a_node_for_each_distinct_beginning() -> None:
    random.seed(0)
    for _ in range(50):
        rows = [random.choices((1, 2), k=random.randint(1, 7)) for _ in range(random.randint(1, 9))]
        tree = Tree.of(nested(rows))
        beginnings = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
        assert len(tree.ids) == len(beginnings)
        for row, nodes in zip(rows, tree.node.tolist(), strict=True):
            path = nodes[: len(row)]
            assert tree.ids[path].tolist() == row
            assert tree.depth[path].tolist() == [*range(len(row))]
            for place, node in enumerate(path):
                assert tree.mask[node].nonzero()[:, 0].tolist() == sorted(path[: place + 1])


def test_parts_keep_their_limits_and_rows() -> None:
    rows = [[1, 2, 3], [7, 8], [1, 2, 4], [1, 2], [7, 8, 9, 9, 9, 9]]
    assert in_order(rows) == ([3, 0, 2, 1, 4], [0, 2, 2, 0, 2])
    wide = 4096  # where attention costs nothing beside the matrices
    assert by_prefix(rows, [1] * 5, 100, wide) == ([[3, 0, 2, 1, 4]], cost([(1, 10)], wide))
    # The last row alone exceeds the limit.
    assert by_prefix(rows, [1] * 5, 4, wide) == ([[3, 0, 2], [1], [4]], cost([(1, 4), (1, 2), (1, 6)], wide))
    # Four used positions are as many as four nodes.
    assert by_prefix(rows, [2] * 5, 4, wide)[0] == [[3, 0], [2], [1], [4]]


def test_the_size_of_trees_is_weighed_against_attention() -> None:
    rows = [[group, *range(200), *([row] * 40)] for group in range(8) for row in range(8)]
    parts = {hidden_size: len(by_prefix(rows, [40] * 64, 8192, hidden_size)[0]) for hidden_size in (64, 576, 8192)}
    assert parts == {64: 12, 576: 5, 8192: 1}
    assert cost([(1, 400)], 64) < cost([(4, 400)], 64) < cost([(1, 1500)], 64)
    assert cost([(1, 1500)], 8192) < cost([(4, 400)], 8192)


def test_other_models_compute_rows() -> None:
    assert takes_trees(model().config)
    assert not takes_trees(Gemma2Config(**SHAPE, attn_implementation="sdpa"))  # windows
    assert not takes_trees(LlamaConfig(**SHAPE, attn_implementation="flash_attention_2"))
    assert not takes_trees(LlamaConfig(**SHAPE, attn_implementation="sdpa", attention_dropout=0.1))
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    assert not takes_trees(Qwen2Config(**SHAPE, attn_implementation="sdpa", **windows))


# --- a whole batch, in several micro-batches --------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank that forms micro-batches as on a CPU."""
    monkeypatch.setattr(transformer_impl, "prepare_micro_batches", sort_by_length(prepare_micro_batches))
    monkeypatch.setattr(transformer_impl, "get_device_id", lambda: "cpu")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def whole_batch(net: torch.nn.Module, batch: TensorDict) -> tuple[Any, list[torch.Tensor], list[tuple[int, ...]]]:
    """Outputs, gradients, and the shape of each micro-batch that the model saw."""
    shapes: list[tuple[int, ...]] = []
    hook = net.register_forward_pre_hook(
        lambda _, args, named: shapes.append((*named["input_ids"].shape,)), with_kwargs=True
    )
    made: Any = engine(SparseLogitsEngine, net)
    made.ulysses_sequence_parallel_size, made.get_data_parallel_size = 1, lambda: 1
    made.engine_config = SimpleNamespace(use_no_sync_for_gradient_accumulation=False, entropy_checkpointing=False)

    def loss(model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: None) -> tuple[torch.Tensor, dict]:
        total = sum((value.values() * used(data)).sum() for value in model_output.values())
        return total / data["batch_num_tokens"], {}

    tu.assign_non_tensor(batch, return_model_output=True)
    net.zero_grad()
    outputs = made.forward_backward_batch(batch, loss)["model_output"]
    hook.remove()
    return outputs, [parameter.grad.clone() for parameter in net.parameters()], shapes


def batch_of(limit: int) -> TensorDict:
    return micro_batch(use_dynamic_bsz=True, max_token_len_per_gpu=limit)


def test_micro_batches_of_trees_give_the_batch_of_rows(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(27)
    trees, gradients, shapes = whole_batch(model(), batch)
    assert shapes == [(1, 26), (1, 22)]
    monkeypatch.setenv(SHARED_PREFIXES, "0")
    rows, plain_gradients, plain_shapes = whole_batch(model(), batch)  # the same batch, after it was made of trees
    assert plain_shapes == [(1, 23), (1, 23), (1, 22), (1, 22), (1, 20), (1, 18), (1, 6)]
    for key, value in rows.items():
        torch.testing.assert_close(trees[key].values() * used(batch), value.values() * used(batch))
    for got, expected in zip(gradients, plain_gradients, strict=True):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("why", ["positions", "states are measured", "verl's partition", "first token"])
def test_other_batches_are_computed_as_rows(alone: None, why: str) -> None:
    batch = batch_of(100)
    assert whole_batch(model(), batch)[2] == [(1, 32)]
    if why == "positions":  # as with padding on the left
        batch["position_ids"] = nested([[0, *range(len(row) - 1)] for row in batch["input_ids"].unbind()])
    elif why == "states are measured":
        tu.assign_non_tensor(batch, **{STRIDE: 4})
    elif why == "verl's partition":
        tu.assign_non_tensor(batch, use_dynamic_bsz=False, micro_batch_size_per_gpu=7)
    elif why == "first token":
        batch["loss_mask"] = nested([[1] * len(row) for row in batch["input_ids"].unbind()])
    assert {rows for rows, _ in whole_batch(model(), batch)[2]} == {3, 4} if why != "verl's partition" else {7}
