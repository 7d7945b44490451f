"""Sends weights over gloo to vLLM servers that run apart from the trainer (``separate_async``). Imports verl.

verl's own engines for this (nccl, nixl, ...) need an accelerator; this one is slow but needs none.
"""

from __future__ import annotations

import pickle
from collections.abc import AsyncGenerator, Generator
from datetime import timedelta
from typing import Any

import ray
import torch
from torch.distributed import ProcessGroupGloo, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

TIMEOUT = timedelta(minutes=10)


@CheckpointEngineRegistry.register("gloo")  # pyright: ignore[reportAttributeAccessIssue]
class GlooCheckpointEngine(CheckpointEngine):
    """``actor_rollout_ref.rollout.checkpoint_engine.backend=gloo``: rank 0 of the actor broadcasts tensor by tensor.

    The group lives for one update: servers may come and go in between.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self.is_master = is_master
        self.store: TCPStore | None = None
        self.group: ProcessGroupGloo | None = None

    def prepare(self) -> dict[str, Any]:
        """The address of the store, from the master alone."""
        if not self.is_master:
            return {}
        host = ray.util.get_node_ip_address().strip("[]")
        self.store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        return {"host": host, "port": self.store.port}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 of the actor, then all servers; the actor's other ranks (-1) only help to gather the tensors."""

        def arguments(ranks: list[int]) -> dict[str, list[Any]]:
            same = {"world_size": 1 + rollout_world_size, "address": metadata[0]}
            return {"rank": ranks, **{name: [value] * len(ranks) for name, value in same.items()}}

        return (
            arguments([0] + [-1] * (actor_wg_world_size - 1)),
            arguments([1 + server for server in range(rollout_world_size)]),
        )

    def init_process_group(self, rank: int, world_size: int, address: dict[str, Any]) -> None:
        if rank < 0:
            return
        self.store = self.store or TCPStore(address["host"], address["port"], is_master=False, timeout=TIMEOUT)
        self.group = ProcessGroupGloo(self.store, rank, world_size, TIMEOUT)

    def finalize(self) -> None:
        self.group = self.store = None

    async def send_weights(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None
    ) -> None:
        # Every rank exhausts the generator: its tensors are gathered from all of them.
        count = 0
        for name, weight in weights:
            if self.group is not None:
                self._announce(count, (name, weight.shape, weight.dtype))
                self._broadcast(weight.detach().cpu().contiguous())
            count += 1
        if self.group is not None:
            self._announce(count, None)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        assert self.store is not None
        count = 0
        while (announced := pickle.loads(self.store.get(f"tensor {count}"))) is not None:
            name, shape, dtype = announced
            weight = torch.empty(shape, dtype=dtype)
            self._broadcast(weight)
            yield name, weight
            count += 1

    def _announce(self, count: int, what: tuple[str, torch.Size, torch.dtype] | None) -> None:
        assert self.store is not None
        self.store.set(f"tensor {count}", pickle.dumps(what))  # pyright: ignore[reportArgumentType]

    def _broadcast(self, weight: torch.Tensor) -> None:
        assert self.group is not None
        content = weight.flatten().view(torch.uint8)  # as bytes: gloo lacks some types
        self.group.broadcast(content, root=0).wait()  # pyright: ignore[reportAttributeAccessIssue]
