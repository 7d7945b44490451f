"""Weights over gloo from the actor's ranks to servers apart from it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.import_utils import import_external_libs

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
