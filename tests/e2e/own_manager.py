"""Agent-loop managers of a user's own: what verl's contract asks for, and no way to the processes behind them."""

from __future__ import annotations

from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import NonTensorData
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.v1 import AgentLoopManagerTQ
from verl.utils import hf_tokenizer
from verl.utils.ray_utils import auto_await
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_turnkey.loops import EpisodeRecorder, drain_log

TURNS = 3


class Hidden:
    """Passes prompts on to verl's manager, which nobody else sees."""

    __slots__ = ("_hidden",)

    @classmethod
    @auto_await
    async def create(cls, *args: Any, **kwargs: Any) -> Hidden:
        manager = cls()
        manager._hidden = await AgentLoopManagerTQ.create(*args, **kwargs)
        return manager

    def generate_sequences(self, prompts: Any) -> Any:
        return self._hidden.generate_sequences(prompts)


class Foreign:
    """Plays in an actor of its own and writes the rows itself, each extra field as a column."""

    __slots__ = ("_players",)

    @classmethod
    @auto_await
    async def create(cls, config: Any, llm_client: Any, **_: Any) -> Foreign:
        manager = cls()
        manager._players = ray.remote(num_cpus=0)(Players).remote(config, llm_client)
        return manager

    def generate_sequences(self, prompts: Any) -> None:
        for i in range(len(prompts)):
            self._players.play.remote({name: _entry(column, i) for name, column in prompts.items()})


def _entry(column: Any, i: int) -> Any:
    """Row ``i`` of a column; what verl sets for the whole batch is one value."""
    if isinstance(column, NonTensorData):
        return column.data
    return column[i] if isinstance(column, torch.Tensor) else column[i].data


class Players:
    """The model says three times where it goes; each "forward" is rewarded."""

    def __init__(self, config: Any, llm_client: Any) -> None:
        tq.init()
        self.config, self.client = config, llm_client
        self.tokenizer = hf_tokenizer(config.actor_rollout_ref.model.path)

    async def play(self, row: dict[str, Any]) -> None:
        rollout, validate = self.config.actor_rollout_ref.rollout, row.pop("validate", False)
        partition = "val" if validate else "train"
        for session in range(rollout.val_kwargs.n if validate else rollout.n):
            outputs = await self._episode({**row, "session_id": session})
            fields = [self._fields(output) | row for output in outputs]
            tags = [self._tag(output) | {"global_steps": row["global_steps"]} for output in outputs]
            keys = [f"{row['uid']}_{session}_{i}" for i in range(len(outputs))]
            columns = list_of_dict_to_tensordict(fields)
            await tq.async_kv_batch_put(keys=keys, fields=columns, tags=tags, partition_id=partition)
        drain_log()
        await tq.async_kv_put(key=row["uid"], partition_id=partition, tag={"status": "finished"})

    async def _episode(self, row: dict[str, Any]) -> list[AgentLoopOutput]:
        episode, answer = EpisodeRecorder(self.config, self.tokenizer, row), "Where do you go?"
        while len(episode) < TURNS:
            messages = [{"role": "user", "content": f"{len(episode)}: {answer}"}]
            prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            sampling = {"max_tokens": 8, "temperature": 1.0, "logprobs": True}
            output = await self.client.generate(f"{row['uid']}", prompt_ids=prompt, sampling_params=sampling)
            text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
            answer = f"You went {text}."
            last = len(episode) + 1 == TURNS
            episode.add(prompt, output, reward=float("forward" in text), action=text, terminated=last, answer=answer)
        return episode.rows()

    def _fields(self, output: AgentLoopOutput) -> dict[str, Any]:
        fields = output.as_dict()
        fields |= fields.pop("extra_fields")
        fields.pop("multi_modal_data", None)
        ids = torch.cat([fields["prompts"], fields["responses"]])
        return fields | {
            "input_ids": ids,
            "position_ids": torch.arange(len(ids)),
            "loss_mask": fields["response_mask"],
            "multi_modal_inputs": {},
        }

    def _tag(self, output: AgentLoopOutput) -> dict[str, Any]:
        prompt, response = len(output.prompt_ids), len(output.response_ids)
        versions = {name: output.extra_fields[name] for name in ("min_global_steps", "max_global_steps")}
        sizes = {"prompt_len": prompt, "response_len": response, "seq_len": prompt + response}
        return {"status": "success", **sizes, **versions}
