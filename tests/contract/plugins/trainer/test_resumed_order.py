"""A run that is stopped and resumed plays the tasks of one that never stopped: none is lost, no group trains twice.

The trainers' own loops, verl's data loader and queue, its agent-loop workers with real environments, and the trajectory
log, by which runs are compared. Only models are missing: a script writes the actions, and an update does nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import ray
import transfer_queue as tq
from contract_tools import PARTITION, SEPARATE, Compose, Saves, unchanged, write
from ray import cloudpickle
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, get_trainer_cls
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode
from verl.workers.rollout.replica import TokenOutput

from verl_turnkey.envs.tasks import Task, write_parquet
from verl_turnkey.plugins.seeing.reading import read

TASKS, BATCH, SESSIONS, STEPS = 10, 4, 2, 5
LEVEL = {"level": "MiniGrid-Empty-Random-6x6-v0"}
DIES_IN = 4
"""the step in which the broken run dies, after a checkpoint of step 2 and another whole step"""


class Script:
    """The language model server's client. The first ``held`` answers never come: their groups stay in flight."""

    def __init__(self, answer: list[int], held: int) -> None:
        self.answer, self.held, self.calls = answer, held, itertools.count()

    async def generate(self, request_id: str, **asked: Any) -> TokenOutput:
        await asyncio.sleep(3600.0 if next(self.calls) < self.held else 0.02)
        said = {"global_steps": 1, "min_global_steps": 1, "max_global_steps": 1, "num_cached_tokens": None}
        return TokenOutput(token_ids=self.answer, log_probs=[-1.0] * len(self.answer), extra_fields=said)


class Idle(Saves):
    """No server and no rank to talk to."""

    workers: tuple[Any, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name in ("update_weights", "abort_replicas", "resume_generation_replicas"):
            return lambda *_: None
        raise AttributeError(name)


class Killed(Exception):
    """Stands in the place of a SIGKILL."""


@pytest.fixture
def start(queue, compose: Compose, tokenizer, tmp_path: Path) -> Any:
    """``start(mode, name, dies_in)``: a start of the run ``name``; the groups it found in flight in its checkpoint."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not find this file
    tasks = [Task("turnkey/MiniGrid-v0", seed, LEVEL) for seed in range(TASKS)]
    write_parquet(tmp_path / "train.parquet", tasks, "MiniGrid", "train")
    segments = (f"20260101T0000{second:02}_0000" for second in range(60))

    def started(mode: str, name: str, dies_in: int | None = None) -> int:
        left = list(tq.kv_list(PARTITION).get(PARTITION, {}))
        if left:  # a new process has a new queue
            tq.kv_clear(keys=left, partition_id=PARTITION)
        config = compose(
            "+turnkey=gigpo",
            f"trainer.v1.trainer_mode=turnkey_{mode}",
            *(SEPARATE if mode == "separate_async" else ()),
            f"data.train_files={tmp_path}/train.parquet",
            f"data.train_batch_size={BATCH}",
            "data.dataloader_num_workers=0",
            f"actor_rollout_ref.rollout.n={SESSIONS}",
            "actor_rollout_ref.rollout.agent.num_workers=1",
            f"trainer.default_local_dir={tmp_path}/{name}/checkpoints",
            f"trainer.total_training_steps={STEPS}",
            "trainer.total_epochs=100",
            "trainer.save_freq=2",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "trainer.logger=[]",
            "turnkey.env.probe=false",
            "turnkey.rollout.max_turns=1",
            "turnkey.stop.patience=null",
            f"turnkey.log.trajectories={tmp_path}/{name}/log",
            f"turnkey.log.segment={next(segments)}",
        )
        trainer: Any = get_trainer_cls(config.trainer.v1.trainer_mode)(config)
        trainer._init_tokenizer()
        trainer._init_dataloader()
        trainer._init_dump_executor()
        trainer.checkpoint_manager = trainer.standalone_checkpoint_manager = trainer.actor_rollout_wg = Idle()
        trainer.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=[])
        trainer.current_mode = HybridEngineMode.TRAINER
        found: list[int] = []
        reissue = trainer._reissue_inflight_prompts
        trainer._reissue_inflight_prompts = lambda: found.append(reissue())

        def unmoved(batch: KVBatchMeta, **_: Any) -> KVBatchMeta:
            return batch

        def old_log_probs(batch: KVBatchMeta, **_: Any) -> KVBatchMeta:
            write(batch, "old_log_probs", unchanged)
            return batch

        def update(batch: KVBatchMeta, **_: Any) -> KVBatchMeta:
            if trainer.global_steps == dies_in:
                raise Killed
            return batch

        trainer._balance_batch, trainer._compute_old_log_prob, trainer._update_actor = unmoved, old_log_probs, update
        trainer._compute_metrics = lambda *_, global_steps, **__: settle() if global_steps == STEPS else None
        trainer._load_checkpoint()
        answer = [*tokenizer.encode("<action>go forward</action>"), tokenizer.eos_token_id]
        script = Script(answer, held=2 if dies_in and mode != "sync" else 0)  # sync waits for all groups
        manager = AgentLoopManagerTQ.create(config=config, llm_client=script, reward_loop_worker_handles=[])
        try:
            trainer.fit(manager)
        except Killed:
            assert dies_in is not None
        finally:
            for worker in manager.agent_loop_workers:
                ray.kill(worker)
        return found[0]

    return started


def settle() -> None:
    """Wait until all groups in the queue are played, so that they are in the log."""
    for _ in range(600):
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


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_a_run_that_died_plays_what_an_unbroken_one_plays(start, tmp_path: Path, mode: str) -> None:
    start(mode, "unbroken")
    waiting = {"unbroken": set(held())}
    start(mode, "broken", DIES_IN)
    in_flight = start(mode, "broken")
    waiting["broken"] = set(held())
    runs = {name: by_group(tmp_path / name / "log") for name in waiting}
    for name, groups in runs.items():
        trained = groups[groups["step"].notna()]
        assert trained["step"].value_counts().to_dict() == dict.fromkeys(range(1, STEPS + 1), BATCH)
        assert set(groups.index) == set(trained.index) | waiting[name], "a group was lost"
        assert not waiting[name] & set(trained.index)
    assert Counter(runs["broken"]["seed"]) == Counter(runs["unbroken"]["seed"])
    if mode == "sync":  # asynchronous trainers take what is finished first
        order = [groups.groupby("step")["seed"].apply(sorted).to_list() for groups in runs.values()]
        assert order[0] == order[1]
        assert order[0][0] != order[0][2], "the order of an epoch"
    else:
        assert in_flight > 0, "nothing was in flight in the checkpoint"
        assert len(waiting["broken"]) == BATCH
