"""Whole runs without a model: the trainers' own loops, verl's data loader and queue, and its agent-loop workers.

Environments and the trajectory log are real, too. A script writes the actions, and an update does nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import transfer_queue as tq
from contract_tools import PARTITION, SEPARATE, Compose, Saves, kill, unchanged, write
from ray import cloudpickle
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, get_trainer_cls
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.workers.rollout.replica import TokenOutput

from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.view.join import read

BATCH, SESSIONS, STEPS = 4, 2, 5


class Script:
    """The language model server's client. The first ``held`` answers never come: their groups stay in flight."""

    def __init__(self, answer: list[int], held: int) -> None:
        self.answer, self.held, self.calls = answer, held, itertools.count()

    async def generate(self, request_id: str, **arguments: Any) -> TokenOutput:
        await asyncio.sleep(3600.0 if next(self.calls) < self.held else 0.02)
        fields = {"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1, "num_cached_tokens": None}
        return TokenOutput(token_ids=self.answer, log_probs=[-1.0] * len(self.answer), extra_fields=fields)


class Idle(Saves):
    """No server and no rank to talk to."""

    workers: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name in ("update_weights", "abort_replicas", "resume_generation_replicas"):
            return lambda *_: None
        raise AttributeError(name)


class Killed(Exception):
    """Stands in the place of a SIGKILL."""


@dataclass
class Start:
    """What a start of a run asked its agent-loop workers for: seeds of tasks, in order."""

    prompts: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    """those that the checkpoint had in flight"""
    saved: list[int] = field(default_factory=list)
    """for each checkpoint, how many had been asked for"""


@dataclass
class Runs:
    """Starts of runs of one data file, each with its checkpoints and its log below ``folder``."""

    compose: Compose
    tokenizer: Any
    folder: Path
    segments: Iterator[str] = field(default_factory=lambda: (f"20260101T0000{second:02}_0000" for second in range(60)))

    def write(self, tasks: Sequence[Task]) -> None:
        write_parquet(self.folder / "train.parquet", tasks, "source", "train")

    def start(
        self,
        mode: str,
        name: str,
        *overrides: str,
        action: str = "go forward",
        held: int = 0,
        on_update: Callable[[int], None] = lambda step: None,
    ) -> Start:
        """Run until the last step, or until ``on_update``, which is called with the step, raises ``Killed``."""
        left = list(tq.kv_list(PARTITION).get(PARTITION, {}))
        if left:  # a new process has a new queue
            tq.kv_clear(keys=left, partition_id=PARTITION)
        config = self.compose(
            "+turnkey=gigpo",
            f"trainer.v1.trainer_mode=turnkey_{mode}",
            *(SEPARATE if mode == "separate_async" else ()),
            f"data.train_files={self.folder}/train.parquet",
            f"data.train_batch_size={BATCH}",
            "data.dataloader_num_workers=0",
            f"actor_rollout_ref.rollout.n={SESSIONS}",
            "actor_rollout_ref.rollout.agent.num_workers=1",
            f"trainer.default_local_dir={self.folder}/{name}/checkpoints",
            f"trainer.total_training_steps={STEPS}",
            "trainer.total_epochs=100",
            "trainer.save_freq=2",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "trainer.logger=[]",
            "turnkey.env.probe=false",
            "turnkey.rollout.max_turns=1",
            "turnkey.stop.patience=null",
            f"turnkey.log.trajectories={self.folder}/{name}/log",
            f"turnkey.log.segment={next(self.segments)}",
            *overrides,
        )
        trainer: Any = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        trainer._init_tokenizer()
        trainer._init_dataloader()
        trainer._init_dump_executor()
        trainer.checkpoint_manager = trainer.standalone_checkpoint_manager = trainer.actor_rollout_wg = Idle()
        trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        trainer.current_mode = HybridEngineMode.TRAINER

        def unmoved(batch: KVBatchMeta, **_: Any) -> KVBatchMeta:
            return batch

        def old_log_probs(batch: KVBatchMeta, **_: Any) -> KVBatchMeta:
            write(batch, "old_log_probs", unchanged)
            return batch

        def update(batch: KVBatchMeta, **_: Any) -> KVBatchMeta:
            on_update(trainer.global_steps)
            return batch

        trainer._balance_batch, trainer._compute_old_log_prob, trainer._update_actor = unmoved, old_log_probs, update
        trainer._compute_metrics = lambda *_, global_steps, **__: settle() if global_steps == STEPS else None
        trainer._load_checkpoint()
        answer = [*self.tokenizer.encode(f"<action>{action}</action>"), self.tokenizer.eos_token_id]
        script = Script(answer, held)
        manager = AgentLoopManagerTQ.create(config=config, llm_client=script, reward_loop_worker_handles=[])
        begun = watched(trainer, manager)
        try:
            trainer.fit(manager)
        except Killed:
            pass
        finally:
            for worker in manager.agent_loop_workers:
                kill(worker)  # it must not write into the next start's queue
        return begun


def watched(trainer: Any, manager: Any) -> Start:
    """What is asked for from now on."""
    begun = Start()
    reissue, save, generate = trainer._reissue_inflight_prompts, trainer._save_checkpoint, manager.generate_sequences
    into = [begun.prompts]

    def generated(prompts: Any) -> Any:
        into[-1].extend(json.loads(task)["seed"] for task in prompts["turnkey_task"])
        return generate(prompts)

    def again() -> int:
        into.append(begun.again)
        try:
            return reissue()
        finally:
            into.pop()

    def saved() -> None:
        save()
        begun.saved.append(len(begun.prompts))

    manager.generate_sequences, trainer._reissue_inflight_prompts, trainer._save_checkpoint = generated, again, saved
    return begun


@pytest.fixture
def runs(queue, compose: Compose, tokenizer, tmp_path: Path) -> Runs:
    """Runs below ``tmp_path``; workers do not find this file."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return Runs(compose, tokenizer, tmp_path)


def settle() -> None:
    """Wait until all groups in the queue are played, so that they are in the log."""
    for _ in range(6000):
        if {tag["status"] for tag in held().values()} <= {"finished"}:
            return
        time.sleep(0.05)
    pytest.fail(f"never played: {held()}")


def held() -> dict[str, dict[str, Any]]:
    """The groups in the queue that no step has trained."""
    items = tq.kv_list(PARTITION).get(PARTITION, {})
    return {key: tag for key, tag in items.items() if tag.get("is_prompt")}


@pytest.mark.filterwarnings("ignore:.*did steps .* again")
def by_group(log: Path) -> pd.DataFrame:
    """For each group its task, its episodes, and the step that trained it."""
    credit = read(log, "credit")
    assert not credit.duplicated(["episode", "turn"]).any(), "an episode trained twice"
    episodes = read(log, "episodes").merge(credit[["episode", "train_step"]], how="left", on="episode")
    assert episodes["episode"].is_unique
    groups = episodes.groupby("group").agg(
        seed=("seed", "first"), seeds=("seed", "nunique"), episodes=("episode", "count"), step=("train_step", "first"),
        steps=("train_step", lambda of: of.nunique(dropna=False)),
    )  # fmt: skip
    assert groups["seeds"].eq(1).all()
    assert groups["episodes"].eq(SESSIONS).all(), "a group with more or fewer episodes than were asked for"
    assert groups["steps"].eq(1).all(), "a group that two steps shared"
    return groups
