"""What several contract tests share and is no fixture."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import hydra
import ray
import torch
import transfer_queue as tq
import verl.trainer.main_ppo as main_ppo
from hydra import compose as hydra_compose
from hydra import initialize_config_module
from omegaconf import DictConfig
from ray.exceptions import ActorUnavailableError, RayActorError
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.experimental.agent_loop import agent_loop as verl_agent_loop
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_turnkey.advantage import Credit, StepBatch, make_record, make_step, register_estimator, registry
from verl_turnkey.plugins.config.command_line import check as check_line

AWKWARD = str(Path(__file__).parent / "awkward_env.py")
TOOL_ENV = str(Path(__file__).parent / "tool_env.py")

Compose = Callable[..., DictConfig]
"""``compose("+turnkey=gigpo", ...)``: the configuration that ``main_ppo`` composes for these overrides."""

PARTITION = "train"
"""of the TransferQueue"""

#: What turnkey_separate_async needs beside the overrides of every run.
SEPARATE = [
    "trainer.v1.separate_async.parameter_sync_step=2",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
]

Episode = list[dict[str, Any]] | str
"""Steps of one episode as arguments of make_step, or the reason why it failed."""
TOKENS = itertools.cycle((3, 1, 4, 2))


def kill(actor: Any) -> None:
    """Kill ``actor`` and wait for its end: Ray kills in the background, and may still answer a call sent at once."""
    ray.kill(actor)
    while True:
        try:
            ray.get(actor.__ray_ready__.remote())
        except ActorUnavailableError:  # it may answer again
            time.sleep(0.05)
        except RayActorError:
            return


class Worker(AgentLoopWorkerTQ.__ray_metadata__.modified_class):
    """verl's class with its postprocessing; only the construction of its servers and tokenizer is left out."""

    def __init__(self) -> None:
        self.processor = None
        self.mm_processor_kwargs: dict[str, Any] = {}
        self.reward_loop_worker_handles = None
        self.distillation_enabled = False


class Pictures(RLHFDataset):
    """verl's default reads images with qwen_vl_utils, which needs torchvision; this is the hook to do it otherwise."""

    @classmethod
    async def process_multi_modal_info(
        cls, messages: list[dict[str, Any]], image_patch_size: int, config: Any
    ) -> tuple[list[Any], None, None]:
        images = [part["image"] for m in messages for part in m["content"] if part["type"] == "image"]
        return images, None, None


def output(record: dict[str, Any], tokens: int, score: float, masked: bool = False) -> AgentLoopOutput:
    """A row of ``tokens`` response tokens, as the loop turnkey_env makes it."""
    return AgentLoopOutput(
        prompt_ids=[5] * (3 + tokens),
        response_ids=[7] * tokens,
        response_mask=[0 if masked else 1] * tokens,
        response_logprobs=[-1.0] * tokens,
        reward_score=score,
        num_turns=2,
        metrics=AgentLoopMetrics(),
        extra_fields={
            "turnkey": record,
            "reward_extra_info": {"acc": score},
            "min_global_steps": 1,
            "max_global_steps": 1,
        },
    )


def row(
    mask: str, steps: Sequence[Mapping[str, Any]] | str | None, score: float = 0.0, **extra: Any
) -> AgentLoopOutput:
    """A row with these steps, with the reason of a failed episode, or without a record; ``mask``: as text."""
    if isinstance(steps, str):
        extra = {"turnkey": make_record([], failed=steps), **extra}
    elif steps is not None:
        extra = {"turnkey": make_record([make_step(**{"reward": 0.0, **step}) for step in steps]), **extra}
    made = output({}, len(mask), score)
    made.prompt_ids, made.response_mask = [5] * 3, [int(m) for m in mask]
    made.extra_fields = {name: value for name, value in made.extra_fields.items() if name != "turnkey"} | extra
    return made


@dataclass(frozen=True)
class NoParams:
    pass


@contextmanager
def registered(credit: Callable[[StepBatch], Any], **needs: Sequence[str]) -> Iterator[list[StepBatch]]:
    """Estimators of these names for a while, in our registry and in verl's: yields the batches that they are given."""
    seen: list[StepBatch] = []

    def estimate(batch: StepBatch, params: NoParams) -> Credit:
        seen.append(batch)
        return Credit(credit(batch))

    for name, columns in needs.items():
        register_estimator(name, params=NoParams, needs=tuple(columns))(estimate)
    try:
        yield seen
    finally:
        for name in needs:
            del registry._ESTIMATORS[name]
            for key in (name, f"turnkey/{name}"):
                core_algos.ADV_ESTIMATOR_REGISTRY.pop(key, None)


def put(
    group: str, session: int, outputs: list[AgentLoopOutput], data: dict[str, Any] | None = None, **model: Any
) -> None:
    """``data``: the fields of the data row, in the place of an empty ``turnkey_task``; ``model``: processor etc."""
    row = {"uid": group, "session_id": session, "global_steps": 1, "data_source": "x"}
    row |= {"turnkey_task": "{}"} if data is None else data
    worker = Worker()
    vars(worker).update(model)
    asyncio.run(worker._agent_loop_postprocess(outputs, False, **row))


def batch_of(tags: dict[str, dict[str, Any]]) -> KVBatchMeta:
    return KVBatchMeta(keys=list(tags), tags=list(tags.values()), partition_id=PARTITION)


def driven(line: list[str]) -> tuple[DictConfig, str]:
    """What ``main_ppo``'s driver makes of the overrides up to the start of Ray: configuration, and what it printed."""
    check_line(line)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra_compose("ppo_trainer", overrides=line)
    with redirect_stdout(StringIO()) as printed:
        main_ppo.auto_set_device(config)
        main_ppo.validate_config(
            config=config,
            use_reference_policy=main_ppo.need_reference_policy(config),
            use_critic=main_ppo.need_critic(config),
        )
    return config, printed.getvalue()


EOS = 2

#: Two groups; the first episode of the batch failed, lengths differ, states repeat inside and across episodes.
EPISODES: dict[str, list[Episode]] = {
    "a": [
        "EnvironmentFailure: it died",
        [
            {"reward": 0.0, "anchor": "s"},
            {"reward": 0.0, "anchor": "t", "penalty": 0.1, "valid": False},
            {"reward": 1.0, "anchor": "t"},
        ],
        [{"reward": 0.0, "anchor": "s"}, {"reward": 0.25, "anchor": "u"}],
        [{"reward": 0.0, "anchor": "s"}],
    ],
    "b": [
        [{"reward": 0.5, "anchor": "s"}, {"reward": 0.0, "anchor": "v"}],
        [{"reward": 0.0, "anchor": "s"}, {"reward": 0.0, "anchor": "v"}],
    ],
}


def fill(episodes: dict[str, list[Episode]]) -> KVBatchMeta:
    """The batch as the replay buffer hands it out: keys and tags, no fields."""
    for group, sessions in episodes.items():
        for session, episode in enumerate(sessions):
            if isinstance(episode, str):
                rows = [output(make_record([], failed=episode), 1, 0.0, masked=True)]
            else:
                score = sum(step["reward"] for step in episode)
                records = [make_record([make_step(step=t, **step)]) for t, step in enumerate(episode)]
                rows = [output(record, next(TOKENS), score) for record in records]
            put(group, session, rows)
    return batch_of(tq.kv_list(PARTITION)[PARTITION])


def nested(rows: Sequence[Sequence[float]] | Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.as_tensor(row, dtype=dtype) for row in rows], layout=torch.jagged)


def write(batch: KVBatchMeta, name: str, value: Callable[[str, int], float]) -> None:
    """Add a response field, one number per token: ``value(key, position)``."""
    lengths = [tag["response_len"] for tag in batch.tags]
    rows = [
        torch.tensor([value(key, i) for i in range(length)], dtype=torch.float32)
        for key, length in zip(batch.keys, lengths, strict=True)
    ]
    fields = TensorDict({name: nested(rows)}, batch_size=len(batch))
    tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=fields)


def unchanged(key: str, position: int) -> float:
    return -1.0  # what the rollout says too


def advance(
    made: Any,
    batch: KVBatchMeta,
    metrics: dict[str, Any] | None = None,
    old_log_probs: Callable[[str, int], float] = unchanged,
) -> KVBatchMeta:
    """verl's steps before the update: the old log-probabilities are there, then advantages are computed."""
    write(batch, "old_log_probs", old_log_probs)
    return made._compute_advantage(batch, {} if metrics is None else metrics)


def rejecting(trainer: Any, rejected: Container[tuple[str, int]], *overrides: str) -> KVBatchMeta:
    """The rows in the queue after verl's advantage step, in which its correction rejected these tokens of rows."""
    correction = (f"algorithm.rollout_correction.{s}" for s in ("rollout_rs=token_k1", "rollout_rs_threshold=0.5_2.0"))
    batch = batch_of(tq.kv_list(PARTITION)[PARTITION])
    drifted = lambda key, i: 2.0 if (key, i) in rejected else -1.0  # noqa: E731
    return advance(trainer(*overrides, *correction), batch, old_log_probs=drifted)


def read(batch: KVBatchMeta, name: str) -> dict[str, list[float]]:
    data = tq.kv_batch_get(keys=batch.keys, partition_id=PARTITION, select_fields=[name])
    return {key: row.tolist() for key, row in zip(batch.keys, data[name].unbind(), strict=True)}


def loop_of_verl(name: str, config: DictConfig, model: Any, tokenizer: Any, **parts: Any) -> Any:
    """The registered agent loop ``name``, made as verl makes it; ``model`` is its client of the servers.

    ``parts`` replace what else there is of a text model.
    """
    return hydra.utils.instantiate(
        config=verl_agent_loop._agent_loop_registry[name],
        trainer_config=verl_agent_loop.DictConfigWrap(config=config),
        server_manager=model,
        tokenizer=tokenizer,
        **{"processor": None, "hf_model_type": "qwen3", "dataset_cls": RLHFDataset, **parts},
        data_config=verl_agent_loop.DictConfigWrap(config.data),
        tools=verl_agent_loop.ToolListWrap([]),
    )


RANKS = 8
"""verl's trainer.n_gpus_per_node"""


class TwoRanks:
    """Stands in the place of the actor's workers: two ranks."""

    def __init__(self) -> None:
        self._dispatch_info = {"actor": [0, 1]}


class Saves:
    """Stands in the place of everything that saves and sleeps: what it was asked for, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def sleep_replicas(self) -> None:
        self.calls.append("sleep")

    def save_checkpoint(self, path: str, remote: Any, step: int, max_ckpt_to_keep: Any) -> None:
        self.calls.append(f"{path.rsplit('/', 2)[-2]} {step}")
        Path(path).mkdir(parents=True, exist_ok=True)
        for content, rank in itertools.product(("model", "optim", "extra_state"), range(RANKS)):
            torch.save({"step": step}, Path(path) / f"{content}_world_size_{RANKS}_rank_{rank}.pt")

    def load_checkpoint(self, local_path: str, del_local_after_load: bool) -> None:
        self.calls.append(local_path.rsplit("/", 2)[-2])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def hanging() -> Any:
    """The answer of a process that hangs, to be ended with ``ray.cancel(answer, force=True)``."""
    import ray

    return ray.remote(num_cpus=0)(lambda: time.sleep(600)).remote()
