"""Effective ranks in verl's engine: against singular values of transformers' own hidden states."""

from __future__ import annotations

import copy
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import one_process_engine
import pytest
import torch
from one_process_engine import VOCABULARY, engine
from tensordict import TensorDict
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_turnkey.plugins.actor.hidden_rank import STRIDE, WINDOW, final_norm, measure, own_states, rank_numbers
from verl_turnkey.plugins.cpu.engine import SparseLogitsEngine
from verl_turnkey.plugins.credit.trainer_columns import RANK

VALUES = json.loads((Path(__file__).parents[3] / "data" / "oracle" / "learned_check_values.json").read_text())
VALUES = VALUES["effective_rank"]
ROWS = [(3, [1] * 17), (5, [0, 1, 1, 0, 1] * 4), (2, [1]), (4, [0])]  # tokens of the prompt, mask of the response


def naive_rank(states: np.ndarray) -> float:
    if len(states) < 2:
        return 0.0
    values = np.linalg.svd(states - states.mean(0), compute_uv=False)
    p = values / (values.sum() + 1e-8)
    return float(np.exp(-(p * np.log(p + 1e-8)).sum()))


def naive_numbers(states: np.ndarray, stride: int, window: int) -> list[float]:
    last = states[-window:]
    ranks = [naive_rank(last[: t + 1]) for t in range(stride, len(last), stride)]
    d = [ranks[j] - sum(ranks[:j]) / j for j in range(1, len(ranks))]
    dd = [after - before for before, after in pairwise(d)]
    return [naive_rank(states), sum(d) / len(d) if d else 0.0, sum(dd) / len(dd) if dd else 0.0]


def test_check_values() -> None:
    table = [[math.sin(1.3 * t + 0.7 * d * d) + 0.1 * d * t for d in range(4)] for t in range(14)]
    numbers = rank_numbers(torch.tensor(table, dtype=torch.float64), stride=4, window=512)
    assert numbers.tolist() == pytest.approx([VALUES["ER"], VALUES["ERV"], VALUES["ERA"]], abs=1e-7)


@pytest.mark.parametrize("shape", [(1, 8), (2, 8), (30, 8), (30, 64), (200, 16), (0, 8)])
def test_numbers_are_those_of_singular_values(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    states = torch.randn(shape, generator=generator) + 3.0
    for stride, window in ((4, 512), (7, 20), (40, 512)):
        expected = naive_numbers(states.double().numpy(), stride, window) if len(states) else [0.0] * 3
        assert rank_numbers(states, stride, window).tolist() == pytest.approx(expected, abs=1e-6)


def test_float32_noise_is_no_rank() -> None:
    """Copies of two states with a constant added span one dimension."""
    states = torch.tensor([[1.0, 2.0, 3.0], [4.0, 4.0, 5.0]]).repeat(20, 1) + 1000
    assert rank_numbers(states, 4, 512).tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-5)


SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, num_attention_heads=2, num_key_value_heads=1)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=2)),
}


def micro_batch(**settings: Any) -> TensorDict:
    return one_process_engine.micro_batch(ROWS, torch.ones(len(ROWS)), **settings)


@pytest.mark.parametrize("kind", [FSDPEngineWithLMHead, SparseLogitsEngine])
@pytest.mark.parametrize("name", MODELS)
def test_the_engine_returns_the_numbers_of_the_models_last_hidden_states(name: str, kind: Any) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    measured = engine(kind, copy.deepcopy(model))
    measure(measured)
    batch = micro_batch(**{STRIDE: 4, WINDOW: 16})
    with torch.no_grad():
        output = measured.forward_step(batch, None, forward_only=True)[1]["model_output"]
        plain = measured.forward_step(micro_batch(), None, forward_only=True)[1]["model_output"]
        expected = []
        for ids, (prompt, mask) in zip(batch["input_ids"].unbind(), ROWS, strict=True):
            states = model(input_ids=ids[None], output_hidden_states=True).hidden_states[-1][0]
            own = states[prompt:][torch.tensor(mask).bool()]
            expected.append(naive_numbers(own.double().numpy(), 4, 16))
    assert output[RANK].shape == (4, 3)
    np.testing.assert_allclose(output[RANK].numpy(), expected, atol=1e-5)
    assert output[RANK][0, 2] != 0
    assert RANK not in plain
    torch.testing.assert_close(output["log_probs"].values(), plain["log_probs"].values())


def test_packed_rows_have_the_states_of_padded_ones() -> None:
    batch = micro_batch()
    lengths = batch["input_ids"].offsets().diff().tolist()
    packed = torch.arange(sum(lengths) * 2.0).reshape(1, -1, 2)
    padded = torch.zeros(len(ROWS), max(lengths), 2)
    for i, row in enumerate(packed[0].split(lengths)):
        padded[i, : len(row)] = row
    for of_packed, of_padded in zip(own_states(packed, batch), own_states(padded, batch), strict=True):
        assert torch.equal(of_packed, of_padded)
    assert [len(states) for states in own_states(packed, batch)] == [sum(mask) for _, mask in ROWS]


def test_a_model_without_a_final_norm_is_refused() -> None:
    with pytest.raises(RuntimeError, match="Linear has no final norm"):
        final_norm(torch.nn.Linear(2, 2))
