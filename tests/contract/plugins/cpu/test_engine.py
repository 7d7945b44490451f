"""Logits at used positions alone: verl's own numbers and gradients there, on real models."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import one_process_engine
import pytest
import torch
from contract_tools import nested
from one_process_engine import SHAPE, engine, step
from tensordict import TensorDict
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import response_from_nested

from verl_turnkey.plugins.cpu.engine import SparseLogitsEngine, used_positions
from verl_turnkey.plugins.credit.metrics import LEARNED

MODELS = {
    "tied": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True)),
    "soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SHAPE, attn_implementation="eager")),
}
ROWS = [(3, [1, 1, 0, 0, 1]), (5, [0, 1, 1]), (2, [1])]  # tokens of the prompt, loss mask of the response


def micro_batch(rows: list[tuple[int, list[int]]] = ROWS) -> TensorDict:
    return one_process_engine.micro_batch(rows, torch.linspace(0.7, 1.3, len(rows)), calculate_sum_pi_squared=True)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_verl(name: str) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name](), micro_batch()
    full, full_gradients = step(FSDPEngineWithLMHead, model, batch)
    sparse, gradients = step(SparseLogitsEngine, model, batch)
    assert list(sparse) == ["log_probs", "entropy", "sum_pi_squared"] == list(full)
    for key, value in sparse.items():
        ours, theirs = (response_from_nested(x, batch["response_mask"]).to_padded_tensor(0) for x in (value, full[key]))
        used = batch["response_mask"].to_padded_tensor(0) == 1
        torch.testing.assert_close(ours[used], theirs[used])
        assert not ours[~used].any()
        assert used.sum() == 6
    for ours, theirs in zip(gradients, full_gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_output_layer_sees_the_used_positions_alone() -> None:
    model, sizes = MODELS["tied"](), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: sizes.append(tuple(output.shape)))
    reused = engine(SparseLogitsEngine, model)
    for rows in (ROWS, ROWS[:2]):
        reused.forward_step(micro_batch(rows), None, forward_only=True)
    assert sizes == [(1, 6, 97), (1, 5, 97)]


def test_without_a_used_position_the_gradients_are_zero() -> None:
    output, gradients = step(SparseLogitsEngine, MODELS["tied"](), micro_batch([(3, [0, 0]), (2, [0])]))
    assert all(not gradient.any() for gradient in gradients)
    assert torch.isfinite(output["log_probs"].values()).all()


def test_observations_that_are_learned_are_computed() -> None:
    model, batch = MODELS["tied"](), micro_batch()
    plain = batch["loss_mask"].to_padded_tensor(0)
    batch[LEARNED] = nested([[0, 0, 0.5, 0, 0], [0.5, 0, 0], [0]], torch.float)
    used = (plain == 1) | (batch[LEARNED].to_padded_tensor(0) > 0)
    outputs = [
        engine(kind, model).forward_step(batch, None, forward_only=True)[1]["model_output"]["log_probs"]
        for kind in (FSDPEngineWithLMHead, SparseLogitsEngine)
    ]
    full, sparse = (response_from_nested(output, batch["response_mask"]).to_padded_tensor(0) for output in outputs)
    torch.testing.assert_close(sparse[used], full[used])
    assert used.sum() == plain.sum() + 2
    assert sparse[used].all()
    assert not sparse[~used].any()


def test_positions_precede_their_tokens() -> None:
    batch = micro_batch()
    expected = [2, 3, 6, 8 + 5, 8 + 6, 16 + 1]
    assert used_positions(batch).tolist() == expected
    batch["loss_mask"] = nested([[0] * prompt + mask for prompt, mask in ROWS])  # as in supervised training
    assert used_positions(batch).tolist() == expected


@pytest.mark.parametrize("mask", ["first tokens", "padded"])
def test_other_masks_go_the_way_of_verl(mask: str) -> None:
    batch = micro_batch()
    lengths = batch["input_ids"].offsets().diff().tolist()
    whole = nested([[1] * length for length in lengths])
    batch["loss_mask"] = whole if mask == "first tokens" else whole.to_padded_tensor(0)
    assert used_positions(batch) is None


HOLES = """
from pathlib import Path
import torch
import verl.workers.engine.fsdp.transformer_impl
from verl_turnkey.plugins.cpu.engine import FreesMemory

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

class Engine:
    def forward_backward_batch(self, count):
        made = [torch.ones(25_000) for _ in range(count)]
        return made[::50]

class Freeing(FreesMemory, Engine):
    pass

for kind in (Engine, Freeing):
    before = resident()
    kept = kind().forward_backward_batch(4000)
    print(resident() - before)
    del kept
"""


def test_what_a_batch_has_freed_is_given_back() -> None:
    """400 MB in small pieces, of which one in 50 lives on."""
    ran = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    held, after = map(float, ran.stdout.split())
    assert held > 200 > 50 > after


# --- weights over gloo from the actor's ranks to servers apart from it ------------------------------------------------


WEIGHTS = {
    "transposed": torch.arange(12, dtype=torch.bfloat16).reshape(3, 4).T,
    "scalar": torch.tensor(2.5),
    "parameter": torch.nn.Parameter(torch.randn(5)),
    "empty": torch.zeros(0, 3),
}


def test_every_server_gets_every_weight_bit_by_bit(compose) -> None:
    config = compose("+turnkey=gigpo", "+turnkey/device=cpu").actor_rollout_ref.rollout.checkpoint_engine
    import_external_libs(config.custom_backend_module)
    engine = CheckpointEngineRegistry.get(config.backend)
    actors = [engine(bucket_size=1 << 20, is_master=rank == 0) for rank in range(2)]
    servers = [engine(bucket_size=1 << 20) for _ in range(2)]
    taken: list[str] = []

    def weights(version: int):
        for name, weight in WEIGHTS.items():
            taken.append(name)
            yield name, weight + version

    async def received(server: Any) -> dict[str, torch.Tensor]:
        return {name: weight async for name, weight in server.receive_weights(global_steps=0)}

    for version in range(2):  # the group of the first update is gone when the second begins
        metadata = [worker.prepare() for worker in (*actors, *servers)]
        topology = engine.build_topology(len(actors), len(servers), metadata)
        arguments = [
            {name: values[i] for name, values in side.items()}
            for side in topology
            for i in range(len(next(iter(side.values()))))
        ]

        def take_part(place: int, version: int = version, arguments: list[Any] = arguments) -> Any:
            worker = (*actors, *servers)[place]
            worker.init_process_group(**arguments[place])
            if place < len(actors):
                return asyncio.run(worker.send_weights(weights(version), global_steps=0))
            return asyncio.run(received(worker))

        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(take_part, range(4)))
        for worker in (*actors, *servers):
            worker.finalize()
        for result in results[len(actors) :]:
            assert list(result) == list(WEIGHTS)
            for name, weight in WEIGHTS.items():
                assert torch.equal(result[name], weight + version)
                assert result[name].dtype == weight.dtype
    # The rank that sends nothing takes its part in gathering: it goes through all weights as well.
    assert len(taken) == 2 * len(actors) * len(WEIGHTS)
