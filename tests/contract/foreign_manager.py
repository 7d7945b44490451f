"""An agent-loop manager that follows verl's contract and nothing more: it writes rows into TransferQueue itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import transfer_queue as tq
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.utils.ray_utils import auto_await
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

Play = Callable[[str], Iterable[list[AgentLoopOutput]]]
"""uid -> the outputs of each session"""


class Manager:
    """Writes each extra field as a column of its own; takes no further attributes and has no workers."""

    __slots__ = ("dropped", "play")

    @classmethod
    @auto_await
    async def create(
        cls, config: Any, llm_client: Any, teacher_client: Any = None, reward_loop_worker_handles: Any = None
    ) -> Manager:
        manager = cls()
        manager.play, manager.dropped = llm_client, ()
        return manager

    def generate_sequences(self, prompts: Any) -> None:
        for uid in prompts["uid"]:
            for session, outputs in enumerate(self.play(uid)):
                rows = [self._row(output) | {"uid": uid, "session_id": session} for output in outputs]
                versions = {"min_global_steps": 1, "max_global_steps": 1}
                sizes = [len(row["prompts"]) + len(row["responses"]) for row in rows]
                tags = [
                    {"seq_len": size, "response_len": len(row["responses"]), **versions}
                    for row, size in zip(rows, sizes, strict=True)
                ]
                keys = [f"{uid}_{session}_{i}" for i in range(len(rows))]
                fields = list_of_dict_to_tensordict(rows)
                tq.kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)
            tq.kv_put(key=uid, partition_id="train", tag={"status": "finished"})

    def _row(self, output: AgentLoopOutput) -> dict[str, Any]:
        row = output.as_dict()
        row |= {name: value for name, value in row.pop("extra_fields").items() if name not in self.dropped}
        return row | {"input_ids": torch.cat([row["prompts"], row["responses"]])}
